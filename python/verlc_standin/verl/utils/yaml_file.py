"""A YAML file as OmegaConf reads it: 1e-3 is a number, dates are text, a key stands once, ${oc.env:NAME,default} and ${a.b} are
filled in. By omegaconf where it is installed."""

import os
import re

import yaml

FLOAT = re.compile(r"""^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?
                        |\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""", re.VERBOSE)
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
DATE = "tag:yaml.org,2002:timestamp"


class Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {key: [(tag, r) for tag, r in found if tag != DATE]
                               for key, found in yaml.SafeLoader.yaml_implicit_resolvers.items()}

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        twice = [k for i, k in enumerate(keys) if k in keys[:i] and k != "<<"]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def referred(tree, what):
    """What ${what} stands for."""
    if what.startswith("oc.env:"):
        name, comma, default = what[len("oc.env:"):].partition(",")
        value = os.environ.get(name.strip(), yaml.load(default, Loader) if comma else None)
        if value is None and not comma:
            raise ValueError(f"${{{what}}}: the environment has no {name.strip()}")
        return value
    if ":" in what:
        raise ValueError(f"${{{what}}}: only oc.env and keys can be filled in without the package omegaconf")
    value = tree
    for part in what.strip().split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return filled(tree, value)


def filled(tree, value):
    if isinstance(value, dict):
        return {k: filled(tree, v) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(tree, v) for v in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = REFERENCE.fullmatch(value)
    if whole:
        return referred(tree, whole[1])
    return REFERENCE.sub(lambda found: str(referred(tree, found[1])), value)


def load_yaml(path, kind=dict):
    """The file's mapping, or the list that it is."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist")
    try:
        from omegaconf import OmegaConf
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except ImportError:
        with open(path, encoding="utf-8") as file:
            tree = yaml.load(file, Loader)
        try:
            tree = filled(tree, tree)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
    if not isinstance(tree, kind):
        raise ValueError(f"{path} is not a {'mapping' if kind is dict else 'list'}")
    return tree
