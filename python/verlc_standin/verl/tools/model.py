"""Checked records: as much of pydantic's models as verl's tool schemas need, without the package.

A record has the fields of its annotations, in their order; values are converted and refused as pydantic does by default, and
a refusal has pydantic's text (the model reads it where a tool makes a wrong ToolResponse).  Invariant: model_dump has the fields
in the order of the class, whatever the order they were given in."""

import json

REQUIRED = object()
PYDANTIC = "2.14"  # whose texts these are
TRUE, FALSE = {"1", "on", "t", "true", "y", "yes"}, {"0", "off", "f", "false", "n", "no"}
SHOWN_BYTES = 50


class ValidationError(ValueError):
    """Fields that do not fit: "N validation errors for CLASS" and a paragraph for each."""

    def __init__(self, title, errors):
        super().__init__(title, errors)
        self.title, self.list = title, errors

    def errors(self):
        return [{"type": kind, "loc": loc, "msg": text, "input": value} for loc, kind, text, value in self.list]

    def error_count(self):
        return len(self.list)

    def __str__(self):
        n = len(self.list)
        lines = [f"{n} validation error{'s' if n != 1 else ''} for {self.title}"]
        for loc, kind, text, value in self.list:
            lines += [".".join(map(str, loc))] if loc else []
            lines += [f"  {text} [type={kind}, input_value={shown(value)}, input_type={type(value).__name__}]",
                      f"    For further information visit https://errors.pydantic.dev/{PYDANTIC}/v/{kind}"]
        return "\n".join(lines)

    __repr__ = __str__


def shown(value):
    """repr, of which the middle is left out beyond 50 bytes."""
    text = repr(value).encode("utf-8", "replace")
    if len(text) <= SHOWN_BYTES:
        return text.decode("utf-8")
    return f"{text[:25].decode('utf-8', 'ignore')}...{text[-24:].decode('utf-8', 'ignore')}"


# ---- kinds of values: kind(value, loc, errors) gives the converted value, or adds to errors ----

def anything(value, loc, errors):
    return value


def text(value, loc, errors):
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            why = "Input should be a valid string, unable to parse raw data as a unicode string"
            errors.append((loc, "string_unicode", why, value))
            return None
    errors.append((loc, "string_type", "Input should be a valid string", value))
    return None


def boolean(value, loc, errors):
    number = str(int(value)) if isinstance(value, (int, float)) and value in (0, 1) else None
    word = value.lower() if isinstance(value, str) else number
    if word in TRUE or word in FALSE:
        return word in TRUE
    if isinstance(value, (str, int)):
        errors.append((loc, "bool_parsing", "Input should be a valid boolean, unable to interpret input", value))
    else:
        errors.append((loc, "bool_type", "Input should be a valid boolean", value))
    return None


def number(value, loc, errors):
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            errors.append((loc, "float_parsing", "Input should be a valid number, unable to parse string as a number", value))
            return None
    try:
        return float(value)  # numpy's too
    except (TypeError, ValueError, OverflowError):
        errors.append((loc, "float_type", "Input should be a valid number", value))
        return None


def integer(value, loc, errors):
    if type(value) is int:
        return value
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        errors.append((loc, "int_type", "Input should be a valid integer", value))
        return None
    if not isinstance(value, str) and whole != value:
        errors.append((loc, "int_from_float", "Input should be a valid integer, got a number with a fractional part", value))
    return whole


def mapping(value, loc, errors):
    if isinstance(value, dict):
        return dict(value)
    errors.append((loc, "dict_type", "Input should be a valid dictionary", value))
    return None


def list_of(kind):
    def check(value, loc, errors):
        if not isinstance(value, (list, tuple, set, frozenset)):
            errors.append((loc, "list_type", "Input should be a valid list", value))
            return None
        return [kind(v, (*loc, i), errors) for i, v in enumerate(value)]
    return check


def dict_of(kind):
    def check(value, loc, errors):
        if mapping(value, loc, errors) is None:
            return None
        out = {}
        for key, v in value.items():
            name = text(key, (*loc, key, "[key]"), errors)
            out[name] = kind(v, (*loc, key), errors)
        return out
    return check


def optional(kind):
    return lambda value, loc, errors: None if value is None else kind(value, loc, errors)


def one_of(**kinds):
    """The first kind that takes the value; the names stand in the place of a refusal."""
    def check(value, loc, errors):
        refused = []
        for name, kind in kinds.items():
            mine = []
            got = kind(value, (*loc, name), mine)
            if not mine:
                return got
            refused += mine
        errors.extend(refused)
        return None
    return check


def named(name, kind):
    """The kind, with another name in one_of's refusals (list[str] is no word)."""
    return lambda value, loc, errors: kind(value, (*loc[:-1], name), errors)


def word(*words):
    def check(value, loc, errors):
        if value in words:
            return value
        errors.append((loc, "literal_error", f"Input should be {' or '.join(map(repr, words))}", value))
        return None
    return check


def record(cls):
    def check(value, loc, errors):
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            errors.append((loc, "model_type", f"Input should be a valid dictionary or instance of {cls.__name__}", value))
            return None
        return cls._checked(value, loc, errors)
    return check


# ---- records ----

class Model:
    """FIELDS of a subclass: {name: (kind, default)}; default REQUIRED: there is none, a function: it makes one."""

    FIELDS = {}

    def __init__(self, **values):
        errors = []
        self._fill(values, (), errors)
        if errors:
            raise ValidationError(type(self).__name__, errors)

    @classmethod
    def _before(cls, values):
        """Looks at the values as they were given; ValueError refuses them."""

    @classmethod
    def _checked(cls, values, loc, errors):
        self = cls.__new__(cls)
        self._fill(values, loc, errors)
        return self

    def _fill(self, values, loc, errors):
        given = set()
        object.__setattr__(self, "model_fields_set", given)
        try:
            self._before(values)
        except ValueError as error:
            errors.append((loc, "value_error", f"Value error, {error}", values))
            return
        for name, (kind, default) in self.FIELDS.items():
            if name in values:
                given.add(name)
                self.__dict__[name] = kind(values[name], (*loc, name), errors)
            elif default is REQUIRED:
                errors.append(((*loc, name), "missing", "Field required", values))
            else:
                self.__dict__[name] = default() if callable(default) else default

    def __setattr__(self, name, value):
        if name not in self.FIELDS:
            raise ValueError(f'"{type(self).__name__}" object has no field "{name}"')
        self.__dict__[name] = value
        self.model_fields_set.add(name)

    @classmethod
    def model_validate(cls, value, **_):
        errors = []
        got = record(cls)(value, (), errors)
        if errors:
            raise ValidationError(cls.__name__, errors)
        return got

    @classmethod
    def model_validate_json(cls, data, **_):
        return cls.model_validate(json.loads(data))

    @classmethod
    def model_construct(cls, _fields_set=None, **values):
        """The values as they are, unchecked."""
        self = cls.__new__(cls)
        object.__setattr__(self, "model_fields_set", set(values) if _fields_set is None else set(_fields_set))
        for name, (_, default) in cls.FIELDS.items():
            if name in values or default is not REQUIRED:
                self.__dict__[name] = values[name] if name in values else default() if callable(default) else default
        return self

    def model_dump(self, *, exclude_unset=False, exclude_none=False, exclude_defaults=False, include=None, exclude=None, **_):
        how = {"exclude_unset": exclude_unset, "exclude_none": exclude_none, "exclude_defaults": exclude_defaults}
        out = {}
        for name, (_, default) in self.FIELDS.items():
            value = self.__dict__.get(name)
            skipped = (include is not None and name not in include) or (exclude is not None and name in exclude)
            is_default = default is not REQUIRED and value == (default() if callable(default) else default)
            if not (skipped or name not in self.__dict__ or (exclude_unset and name not in self.model_fields_set)
                    or (exclude_none and value is None) or (exclude_defaults and is_default)):
                out[name] = dumped(value, how)
        return out

    def model_dump_json(self, *, indent=None, **how):
        return json.dumps(self.model_dump(**how), ensure_ascii=False, indent=indent, separators=None if indent else (",", ":"))

    def model_copy(self, *, update=None, deep=False):
        import copy
        values = {k: copy.deepcopy(v) if deep else v for k, v in self._values().items()}
        return self.model_construct(self.model_fields_set | set(update or {}), **values | (update or {}))

    def _values(self):
        return {name: self.__dict__[name] for name in self.FIELDS if name in self.__dict__}

    def __iter__(self):
        return iter(self._values().items())

    def __eq__(self, other):
        return type(other) is type(self) and self._values() == other._values()

    __hash__ = None

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._values().items())})"

    def __str__(self):
        return " ".join(f"{k}={v!r}" for k, v in self._values().items())


def dumped(value, how):
    if isinstance(value, Model):
        return value.model_dump(**how)
    if isinstance(value, dict):
        return {k: dumped(v, how) for k, v in value.items() if not (how["exclude_none"] and v is None)}
    return [dumped(v, how) for v in value] if isinstance(value, list) else value
