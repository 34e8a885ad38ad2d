"""Where named models and gsm8k come from: the hub of Hugging Face, or its caches here."""

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from lab.accuracy.settings import SettingError

DATA_SET: Final = "openai/gsm8k"
ENDPOINT: Final = "https://huggingface.co"
TIMEOUT_S: Final = 10.0


class Hub(Protocol):
    """Where named models come from."""

    def is_reachable(self) -> bool:
        """Whether it answers now."""

    def has_model(self, name: str) -> bool:
        """Whether there is a local copy."""

    def has_data_set(self) -> bool:
        """Whether there is a local copy of gsm8k."""


class HuggingFace:
    """The hub, unless the environment says that we are offline, and its caches."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Takes the environment; asks nobody yet."""
        self._env = env
        self._is_reachable: bool | None = None

    def is_reachable(self) -> bool:
        """Asked once.

        Raises:
            SettingError: if HF_ENDPOINT is no URL.
        """
        if self._is_reachable is None:
            offline = self._env.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
            endpoint = self._env.get("HF_ENDPOINT") or ENDPOINT
            self._is_reachable = not offline and has_web_server(endpoint)
        return self._is_reachable

    def has_model(self, name: str) -> bool:
        """Its configuration is in the cache: what else is missing, vLLM will say."""
        return _is_cached(name, "config.json", "model")

    def has_data_set(self) -> bool:
        """As the files of the hub, or as `datasets` keeps it."""
        home = Path(self._env.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        kept = Path(self._env.get("HF_DATASETS_CACHE") or home / "datasets")
        folder = kept / DATA_SET.replace("/", "___")
        return folder.is_dir() or _is_cached(DATA_SET, "README.md", "dataset")


def has_web_server(endpoint: str) -> bool:
    """Whether a web server answers there, whatever it says.

    Raises:
        SettingError: if that is no URL.
    """
    bad = SettingError("HF_ENDPOINT", endpoint, f"allowed is a URL such as {ENDPOINT}")
    if not endpoint.startswith(("http://", "https://")):
        raise bad
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except (ValueError, http.client.InvalidURL) as error:
        raise bad from error
    except (OSError, http.client.HTTPException):
        return False
    return True


def _is_cached(name: str, file: str, kind: str) -> bool:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - it takes a second
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        path = try_to_load_from_cache(name, file, repo_type=kind)
    except HFValidationError as error:
        raise SettingError("MODEL_NAMES", name, "no folder, and no name on the hub") from error
    return isinstance(path, str) and os.path.exists(path)  # noqa: PTH110
