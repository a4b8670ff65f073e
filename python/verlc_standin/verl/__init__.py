"""The stand-in of verl under `verlc exec`, and for reward files without it: what Python outside verl imports of it.
Its programs are verlc_entry.py's. Original work; names and behaviour are verl's."""


def __getattr__(name):
    """DataProto needs numpy, which a launcher's interpreter may lack: imported where it is asked for."""
    if name in ("DataProto", "DataProtoItem"):
        from verl import protocol
        return getattr(protocol, name)
    raise AttributeError(f"the stand-in of verl has no '{name}'")
