"""The stand-in of verl under `verlc exec`, and for reward files without it: what Python outside verl imports of it.
Its programs are verlc_entry.py's. Original work; names and behaviour are verl's."""
