"""Where rounds of a fuzz run come from: a simulated serving engine, steered to boundaries."""
