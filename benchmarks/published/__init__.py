"""Numbers that papers print, measured again: one module a paper, each a generator of rows.

`python -m benchmarks.published` is the door (`python noxfile.py -s published`).
"""
