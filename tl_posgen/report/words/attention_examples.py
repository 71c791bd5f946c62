"""What is said of a result named attention_examples."""

TITLE = "What does the additive fit get right in the attention itself?"
QUESTION = (
    "Softmax of the true scores, softmax of the additive fit, and their difference, for the heads with the highest "
    "and lowest correlation within rows. Hover a cell for its value; first 128 tokens of the first prompt."
)
