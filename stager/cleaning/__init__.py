"""What ``clean`` looks at."""
