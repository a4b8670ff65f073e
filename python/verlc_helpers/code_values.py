"""Values as JSON between a program that is tested and what tests it: code_program.py writes and code_statement.py reads them,
and the other way round.

None, bool, float, str and int of 64 bits are themselves; all else is an object with one key, its kind: {"int": hex}, {"list":
[...]}, {"dict": [[key, value], ...]}, {"bytes": hex}, {"std": [name, part, ...]} for some types of the standard library and
numpy's arrays, {"builtin": name}.  What neither side can copy is the end that owns it to say: `other` of encode and decode.

Invariant: what decode makes is of exactly these types, so that == between two of them runs no code of the program's.
"""

import builtins
import collections
import datetime
import decimal
import fractions

INT_BITS = 63
DEEP = 5000  # Python's limit of recursion while values are copied
FUNCTIONS = "abs all any ascii bin callable chr divmod format hash hex len max min oct ord pow repr round sorted sum".split()
BUILTINS = {name: v for name, v in vars(builtins).items() if name in FUNCTIONS or isinstance(v, type) and not name.startswith("_")}
SCALARS = (bool, float, str, type(None))


def numpy_array(dtype, values):
    import numpy
    return numpy.array(values, dtype=numpy.dtype(dtype))


def counter(pairs):
    made = collections.Counter()
    for key, n in pairs:
        made[key] = n
    return made


# name -> (type, its parts, of them again)
STD = {
    "Fraction": (fractions.Fraction, lambda v: (v.numerator, v.denominator), fractions.Fraction),
    "Decimal": (decimal.Decimal, lambda v: (str(v), ), decimal.Decimal),
    "date": (datetime.date, lambda v: (v.year, v.month, v.day), datetime.date),
    "datetime": (datetime.datetime, lambda v: v.timetuple()[:6] + (v.microsecond, ), datetime.datetime),
    "timedelta": (datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds), datetime.timedelta),
    "deque": (collections.deque, lambda v: (list(v), v.maxlen), collections.deque),
    "OrderedDict": (collections.OrderedDict, lambda v: (list(v.items()), ), collections.OrderedDict),
    "Counter": (collections.Counter, lambda v: (list(v.items()), ), counter),
    "defaultdict": (collections.defaultdict, lambda v: (list(v.items()), ), lambda pairs: collections.defaultdict(None, pairs)),
    "complex": (complex, lambda v: (v.real, v.imag), complex),
    "range": (range, lambda v: (v.start, v.stop, v.step), range),
    "slice": (slice, lambda v: (v.start, v.stop, v.step), slice),
    "ndarray": (None, None, numpy_array),
}
STD_OF = {kind: (name, parts) for name, (kind, parts, _) in STD.items() if kind}
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
    if kind in STD_OF:
        name, parts = STD_OF[kind]
        if getattr(value, "tzinfo", None) is not None:
            raise Unknown
        return {"std": [name, *map(encode, parts(value))]}
    return of_numpy(value, encode)


def of_numpy(value, encode):
    if type(value).__module__ != "numpy" or not hasattr(value, "dtype") or value.dtype.kind not in "biufcUS":
        raise Unknown
    if type(value).__name__ == "ndarray":
        return {"std": ["ndarray", value.dtype.str, encode(value.tolist())]}
    return encode(value.item())


def encode(value, other):
    """The JSON of a value.  other(value, one): of what only its owner knows, or None: it is of no such kind."""
    def one(value):
        said = other(value, one)
        return exactly(value, one) if said is None else said

    return one(value)


def decode(said, other):
    """The value of its JSON.  other(kind, what, one): of a kind that is not of this file."""
    def one(said):
        if type(said) in SCALARS or type(said) is int:
            return said
        (kind, what), = said.items()
        if kind in MANY:
            return MANY[kind]([one(item) for item in what])
        if kind == "dict":
            return {one(key): one(item) for key, item in what}
        if kind == "int":
            return int(what, 16)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(what)
        if kind == "std":
            return STD[what[0]][2](*map(one, what[1:]))
        if kind == "builtin":
            return BUILTINS[what]
        return other(kind, what, one)

    return one(said)


def builtin_name(value):
    """Its name, of a type or a plain function of builtins; else None."""
    name = getattr(value, "__name__", None)
    return name if type(name) is str and BUILTINS.get(name) is value else None
