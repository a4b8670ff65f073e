"""Values as JSON between a program that is tested and what tests it: code_program.py writes and code_statement.py reads them,
and the other way round.

None, bool, float, str and int of 64 bits are themselves; all else is an object with one key, its kind: {"int": hex}, {"list":
[...]}, {"dict": [[key, value], ...]}, {"bytes": hex}, {"std": [name, part, ...]} for some types of the standard library and
numpy's arrays, {"builtin": name}.  What neither side can copy is the end that owns it to say: `other` of encode and decode.

Invariant: what decode makes is of exactly these types, so that == between two of them runs no code of the program's.
"""

import builtins
import importlib
import sys

INT_BITS = 63
DEEP = 5000  # Python's limit of recursion while values are copied
FUNCTIONS = "abs all any ascii bin callable chr divmod format hash hex len max min oct ord pow repr round sorted sum".split()
BUILTINS = {name: v for name, v in vars(builtins).items() if name in FUNCTIONS or isinstance(v, type) and not name.startswith("_")}
SCALARS = (bool, float, str, type(None))


def counter(kind, pairs):
    made = kind()
    for key, n in pairs:
        made[key] = n
    return made


def numpy_array(_, dtype, values):
    import numpy
    return numpy.array(values, dtype=numpy.dtype(dtype))


def items(v):
    return (list(v.items()), )


# name -> (module, which loads when a value comes; parts of a value; how it is made of them, else by calling the type)
STD = {
    "Fraction": ("fractions", lambda v: (v.numerator, v.denominator)),
    "Decimal": ("decimal", lambda v: (str(v), )),
    "date": ("datetime", lambda v: (v.year, v.month, v.day)),
    "datetime": ("datetime", lambda v: v.timetuple()[:6] + (v.microsecond, )),
    "timedelta": ("datetime", lambda v: (v.days, v.seconds, v.microseconds)),
    "deque": ("collections", lambda v: (list(v), v.maxlen)),
    "OrderedDict": ("collections", items),
    "Counter": ("collections", items, counter),
    "defaultdict": ("collections", items, lambda kind, pairs: kind(None, pairs)),
    "complex": ("builtins", lambda v: (v.real, v.imag)),
    "range": ("builtins", lambda v: (v.start, v.stop, v.step)),
    "slice": ("builtins", lambda v: (v.start, v.stop, v.step)),
    "ndarray": ("numpy", lambda v: (v.dtype.str, v.tolist()), numpy_array),
}
MANY = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

# What is asked of a program's objects, by the names of operator and builtins.
BINARY = ("eq ne lt le gt ge add sub mul matmul truediv floordiv mod divmod pow lshift rshift and_ or_ xor iadd isub imul "
          "iand ior ixor").split()
UNARY = "len iter next bool str repr hash int float complex index abs neg pos invert round reversed dir format".split()


class Unknown(Exception):
    """A value of no kind that is known here."""


def exactly(value, encode):
    """The JSON of a value whose type is one of ours, not a class derived from it."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is int:
        return value if value.bit_length() <= INT_BITS else {"int": hex(value)}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if (name := std_name(kind)) and getattr(value, "tzinfo", None) is None and of_numbers(value):
        return {"std": [name, *map(encode, STD[name][1](value))]}
    if kind.__module__ == "numpy" and of_numbers(value) and hasattr(value, "item"):
        return encode(value.item())
    raise Unknown


def std_name(kind):
    """The name of a type of STD; None: it is none, or a program's that is called so."""
    name = kind.__name__
    return name if name in STD and getattr(sys.modules.get(STD[name][0]), name, None) is kind else None


def of_numbers(value):
    """Of numpy's arrays and numbers: whether they hold what Python's numbers and texts do."""
    return not hasattr(value, "dtype") or value.dtype.kind in "biufcUS"


def decode_std(name, *parts):
    module, _, *make = STD[name]
    kind = getattr(importlib.import_module(module), name)
    return make[0](kind, *parts) if make else kind(*parts)


def encode(value, other):
    """The JSON of a value.  other(value, one): of what only its owner knows, or None: it is of no such kind."""
    def one(value):
        encoded = other(value, one)
        return exactly(value, one) if encoded is None else encoded

    return one(value)


def decode(encoded, other):
    """The value of its JSON.  other(kind, what, one): of a kind that is not of this file."""
    def one(encoded):
        if type(encoded) in SCALARS or type(encoded) is int:
            return encoded
        (kind, what), = encoded.items()
        if kind in MANY:
            return MANY[kind]([one(item) for item in what])
        if kind == "dict":
            return {one(key): one(item) for key, item in what}
        if kind == "int":
            return int(what, 16)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(what)
        if kind == "std":
            return decode_std(what[0], *map(one, what[1:]))
        if kind == "builtin":
            return BUILTINS[what]
        return other(kind, what, one)

    return one(encoded)


def builtin_name(value):
    """Its name, of a type or a plain function of builtins; else None."""
    name = getattr(value, "__name__", None)
    return name if type(name) is str and BUILTINS.get(name) is value else None
