"""What the program's own code does, its lines, loops and backward passes, and the next steps that fit it."""
