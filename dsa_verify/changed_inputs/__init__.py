"""Changed inputs: any callable, captured once, is replayed over inputs that change, beside itself run eagerly."""
