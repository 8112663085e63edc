"""Reports: the same results as terminal lines, JSON and JUnit XML."""
