"""What a report says of each result: one file a result, named after it.

`TITLE` and `QUESTION` head its section. Where there are any, `found(result)` gives sentences with numbers in them, and
`table(dataset)` a short table for the terminal and the page, in place of one row a head.
"""
