"""What is said of a result named claims."""

TITLE = "What the papers claim, on this model"
QUESTION = (
    "A row a claim, in our words: the verdict, the numbers it rests on, and the same numbers for a randomly "
    "initialised model. The criteria are ours and stand beside the verdicts."
)
