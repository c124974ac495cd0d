"""Pure maths."""
