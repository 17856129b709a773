"""The same small network trained three ways: by our loop, by a minimal script, by Hugging Face."""
