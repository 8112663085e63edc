"""The pytest plugin: options and summary, the dsa fixture, and case files as test items."""
