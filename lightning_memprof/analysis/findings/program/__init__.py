"""What the program's own lines do, and the next steps that fit it."""
