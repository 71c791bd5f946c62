"""What is said of a result named perturbation."""

TITLE = "How much order does the model need?"
QUESTION = (
    "Loss after moving tokens in the text (T), positions of q and k (P), and rotated features (F), by the share of "
    "tokens moved; 95 % bootstrap intervals over prompts and seeds."
)
