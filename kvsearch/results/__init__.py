"""What was measured, compared."""
