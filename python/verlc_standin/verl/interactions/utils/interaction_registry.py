"""The interactions of a run from its YAML: interaction: [{name, class_name: package.module.Class, config}]."""

from verl.tools.tool_registry import get_tool_class
from verl.utils.yaml_file import load_yaml

SUFFIX = "Interaction"


def get_interaction_class(cls_name):
    return get_tool_class(cls_name)


def initialize_interactions_from_config(interaction_config_file):
    """{name: object}. A missing name is the class's without Interaction, in lower case."""
    entries = load_yaml(interaction_config_file).get("interaction")
    if not isinstance(entries, list):
        raise ValueError(f"{interaction_config_file} has no list 'interaction'")
    found = {}
    for k, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ValueError(f"{interaction_config_file}: interaction[{k}] has no class_name")
        name = entry.get("name")
        if name is None:
            name = entry["class_name"].rpartition(".")[2].removesuffix(SUFFIX).lower()
        if name in found:
            raise ValueError(f"Duplicate interaction name '{name}' found. Each interaction must have a unique name.")
        config = {**(entry.get("config") or {}), "name": name}
        found[name] = get_interaction_class(entry["class_name"])(config=config)
    return found
