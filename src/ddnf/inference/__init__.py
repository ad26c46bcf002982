"""What people fit, and how they judge it."""
