"""Training data: labelled texts and images, read from files."""
