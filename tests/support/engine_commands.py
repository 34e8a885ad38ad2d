"""The command lines that start engines, wherever a file or a document has one."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

REPO: Final = Path(__file__).resolve().parents[2]
KEY: Final = "5f" * 32
POD_IP: Final = "10.0.0.1"
OPTION: Final = "--kv-transfer-config"

STARTS: Final = re.compile(
    r"\bvllm serve\b|-m (?:vllm\.entrypoints\.openai\.api_server|dynamo\.vllm)\b"
    rf"|(?m:^[ \t]*(?={OPTION}))"
)
"""The text before an engine's arguments; a reader adds an option that has its own line."""

CONNECTORS: Final = re.compile(r"\bkv_connector\b[\"']?\s*[:=]")
"""Every engine's configuration names one, so that none is overlooked."""

OF_DYNAMO: Final = ("--disaggregation-mode", "--discovery-backend")
SEPARATORS: Final = "\n&;|"


@dataclass(frozen=True)
class EngineCommand:
    """The arguments of `vllm serve`, and the variables that the engine sees."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def in_file(path: Path) -> list[EngineCommand]:
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        return list(in_resources(yaml.safe_load_all(text)))
    if path.suffix != ".md":
        return list(in_shell(text))
    return [
        command
        for kind, code in blocks(text)
        for command in (
            in_resources(yaml.safe_load_all(code)) if kind == "yaml" else in_shell(code)
        )
    ]


def mentions(path: Path) -> int:
    """How often a file names a connector."""
    return len(CONNECTORS.findall(path.read_text(encoding="utf-8")))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Markdown's blocks of code, each with the language after its fence, if it has one."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    yield from fence.findall(text)
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", fence.sub("", text), re.MULTILINE):
        yield "", "\n".join(line.removeprefix("    ") for line in block.splitlines())


def in_shell(text: str) -> Iterator[EngineCommand]:
    """In a script; variables that stand before a command are its own."""
    code = re.sub(r"^[ \t]*#.*", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    code = re.sub(
        r'"\$\(cat ([\w./-]+)\)"',
        lambda match: shlex.quote((REPO / match[1]).read_text("utf-8")),
        code,
    )
    code = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", code)  # a variable's default
    for start in STARTS.finditer(code):
        before = code[code.rfind("\n", 0, start.start()) + 1 : start.start()]
        assigned = [word.partition("=") for word in shlex.split(before) if "=" in word]
        environment = {"NIXL_KV_KEY": KEY} | {name: value for name, _, value in assigned}
        yield EngineCommand(_arguments(_words(code[start.end() :])), environment)


def in_resources(documents: Iterator[Any]) -> Iterator[EngineCommand]:
    """In what YAML says: lists of arguments, lines of a shell, and Ray's `engine_kwargs`."""
    for document in documents:
        yield from _in_value(document, {"NIXL_KV_KEY": KEY})


def _in_value(value: Any, environment: Mapping[str, str]) -> Iterator[EngineCommand]:
    if isinstance(value, dict):
        inner = environment_of(value) or environment
        kwargs = value.get("engine_kwargs")
        if isinstance(kwargs, dict):
            pairs = ((name.replace("_", "-"), given) for name, given in kwargs.items())
            options = [
                f"--{name}={given if isinstance(given, str) else json.dumps(given)}"
                for name, given in pairs
            ]
            yield EngineCommand(("MODEL", *options), inner)
        for key, entry in value.items():
            if key != "engine_kwargs":
                yield from _in_value(entry, inner)
    elif isinstance(value, list):
        entries = tuple(entry for entry in value if isinstance(entry, str))
        if len(entries) == len(value) and any(word.startswith(OPTION) for word in entries):
            yield EngineCommand(_arguments(entries), environment)
        else:
            for entry in value:
                yield from _in_value(entry, environment)
    elif isinstance(value, str) and OPTION in value:
        found = [one.arguments for one in in_shell(value)]
        for arguments in found or [_arguments(shlex.split(value))]:
            yield EngineCommand(arguments, environment)


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container, of Kubernetes or of compose, as it would see them."""
    entries = container.get("env") or container.get("environment") or {}
    if isinstance(entries, str):  # of a secret of compose: the variable that has it
        return {}
    if isinstance(entries, dict):
        return {name: _interpolated(str(value)) for name, value in entries.items()}
    return {entry["name"]: _kubernetes_value(entry) for entry in entries}


def _kubernetes_value(entry: Mapping[str, Any]) -> str:
    match entry:
        case {"value": str(value)}:
            return value
        case {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
            return POD_IP
    raise ValueError(f"{entry} is nothing that a test knows")


def _interpolated(text: str) -> str:
    """The text as compose interpolates it, if only the key is set."""
    return re.sub(
        r"\$\{(\w+)(?::?[-?]([^}]*))?\}",
        lambda match: KEY if match[1] == "NIXL_KV_KEY" else match[2] or "",
        text,
    )


def _words(text: str) -> Iterator[str]:
    """A shell's words, up to the end of the command."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for word in lexer:
        if set(word) <= set(SEPARATORS):
            return
        yield word


def _arguments(words: Any) -> tuple[str, ...]:
    """With a model, if the launcher adds it, and without Dynamo's own arguments."""
    given = iter(words)
    kept: list[str] = []
    for word in given:
        if word in OF_DYNAMO:
            next(given)
        else:
            kept.append(word)
    if kept[:2] == ["vllm", "serve"]:
        kept = kept[2:]
    has_model = "--model" in kept or not kept[0].startswith("--")
    return tuple(kept) if has_model else ("MODEL", *kept)
