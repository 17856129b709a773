"""What the user names: requirement files, and sources that must become wheels first."""
