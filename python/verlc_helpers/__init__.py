"""Helper processes of verlc: what is Python by nature, one module each.

Each module is started as ``python3 -m verlc_helpers.NAME`` would be and answers JSON
requests (see protocol.py).  By hand it reads one JSON request a line from
standard input and prints one reply a line.
"""
