"""What is said of a result named substitution."""

TITLE = "Does the model run on position + meaning?"
QUESTION = (
    "All attention scores are replaced in the running model, and the loss is measured. Recovered: share of the way "
    "from uniform attention (0) to the untouched model (1). A high correlation alone would not tell."
)
