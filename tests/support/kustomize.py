"""What `kubectl kustomize` makes of a folder, as far as the folders here go.

A field that it does not know is an error, so that none is left out unseen.
"""

import base64
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Resource = dict[str, Any]

FIELDS: Final = {
    "apiVersion",
    "kind",
    "resources",
    "patches",
    "images",
    "secretGenerator",
    "generatorOptions",
}
LISTS_BY_NAME: Final = ("containers", "initContainers", "env", "volumes")


def build(folder: Path, generated: Mapping[str, str]) -> list[Resource]:
    """All resources of a folder's kustomization.

    Args:
        folder: has a kustomization.yaml.
        generated: the text of files that users make, by their names.

    Raises:
        OSError: if a file that is named does not exist.
        ValueError: if something is not known here, or a patch fits nothing.
    """
    said = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    _all_known(folder, said, FIELDS)
    _all_known(folder, said.get("generatorOptions", {}), {"disableNameSuffixHash"})
    resources = [
        one for path in said.get("resources", ()) for one in _load(folder / path, generated)
    ]
    resources += [_secret(folder, one, generated) for one in said.get("secretGenerator", ())]
    for entry in said.get("patches", ()):
        _all_known(folder, entry, {"path"})
        (patch,) = _documents(folder / entry["path"])
        (target,) = [one for one in resources if _id(one) == _id(patch)]
        resources[resources.index(target)] = _merged(target, patch)
    for image in said.get("images", ()):
        _all_known(folder, image, {"name", "newName", "newTag"})
        if not _replace_image(resources, image["name"], f"{image['newName']}:{image['newTag']}"):
            raise ValueError(f"{folder}: no container has the image {image['name']}")
    return resources


def _load(path: Path, generated: Mapping[str, str]) -> list[Resource]:
    return build(path, generated) if path.is_dir() else _documents(path)


def _documents(path: Path) -> list[Resource]:
    # Anchors give several places one object, and patches must not reach them all.
    return copy.deepcopy(list(yaml.safe_load_all(path.read_text(encoding="utf-8"))))


def _secret(folder: Path, said: Resource, generated: Mapping[str, str]) -> Resource:
    _all_known(folder, said, {"name", "envs"})
    lines = [line for name in said["envs"] for line in generated[name].splitlines()]
    pairs = (line.partition("=") for line in lines)
    data = {name: base64.b64encode(value.encode()).decode() for name, _, value in pairs}
    metadata = {"name": said["name"]}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata} | {
        "data": data
    }


def _id(resource: Resource) -> tuple[str, str, str]:
    return resource["apiVersion"], resource["kind"], resource["metadata"]["name"]


def _all_known(folder: Path, said: Resource, known: set[str]) -> None:
    if unknown := set(said) - known:
        raise ValueError(f"{folder}: {sorted(unknown)} is not known here")


def _merged(target: Any, patch: Any, key: str = "") -> Any:
    """A strategic merge: what is named is changed, and other lists are replaced."""
    if isinstance(target, dict) and isinstance(patch, dict):
        changed = {name: _merged(target.get(name), value, name) for name, value in patch.items()}
        return target | changed
    if not isinstance(patch, list):
        return patch
    if {"$patch": "replace"} in patch:
        return [entry for entry in patch if entry != {"$patch": "replace"}]
    if key not in LISTS_BY_NAME:
        if any(isinstance(entry, dict) for entry in patch):
            raise ValueError(f"how to merge {key} is not known here")
        return patch
    entries = {entry["name"]: entry for entry in target or ()}
    for entry in patch:
        entries[entry["name"]] = _merged(entries.get(entry["name"]), entry)
    return list(entries.values())


def _replace_image(value: Any, name: str, image: str) -> int:
    """Name images that have another name for now; returns how many."""
    entries = value if isinstance(value, list) else list(value.values())
    count = sum(
        _replace_image(entry, name, image) for entry in entries if isinstance(entry, dict | list)
    )
    if isinstance(value, dict) and value.get("image") == name:
        value["image"] = image
        count += 1
    return count
