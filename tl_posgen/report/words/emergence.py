"""What is said of a result named emergence."""

TITLE = "When does the split form?"
QUESTION = "Every measure over training checkpoints, from step 0."
