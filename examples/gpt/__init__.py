"""Parts of `train_gpt.py`, one concept a file."""
