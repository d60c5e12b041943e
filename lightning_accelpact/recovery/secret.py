"""The secret of a run, which its launcher hands to every rank, and the seal that it puts on every control message."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("accelpact")

VARIABLE = "ACCELPACT_SECRET"
FILE_VARIABLE = "ACCELPACT_SECRET_FILE"
_SHORTEST = 16  # characters


def run_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """What the launcher has handed out, in a variable or in a file.

    Args:
        environment: Where the variables are.

    Returns:
        The secret. Without one torchrun's run id, which is no secret: it tells the messages of two runs apart, no more.

    Raises:
        ValueError: if it is too short, if both variables are set, or if the file cannot be read.
    """
    text, file = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
    if text is not None and file is not None:
        raise ValueError(f"{VARIABLE} and {FILE_VARIABLE} are both set: unset one of them")
    if text is None and file is None:
        return f"run id {environment.get('TORCHELASTIC_RUN_ID', '')}".encode()
    origin, text = (VARIABLE, text) if file is None else (f"{FILE_VARIABLE}={file}", _content(file))
    if len(text) < _SHORTEST:
        raise ValueError(
            f"the secret in {origin} has {len(text)} characters, but needs at least {_SHORTEST}: make one for each run,"
            " as `openssl rand -hex 32` does"
        )
    return text.encode()


def _content(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{FILE_VARIABLE}={file} cannot be read: {error}") from None


def hand_out() -> None:
    """Make a secret, unless there is one, for the processes that this one starts: they inherit its environment."""
    if VARIABLE not in os.environ and FILE_VARIABLE not in os.environ:
        os.environ[VARIABLE] = secrets.token_hex(32)


@dataclass(frozen=True)
class Message:
    """What a sealed text says.

    Args:
        sender: The rank that has sealed it.
        text: What it says.
    """

    sender: int
    text: str


class Seal:
    """Seals one rank's messages and opens everybody's: HMAC-SHA256 over namespace, key, sender and text.

    The key names run, generation and number of what is agreed on, so that a sealed text counts in one place only and
    not in a later repair, run or attempt.

    Args:
        secret: Of the run.
        namespace: The store's, which differs between the attempts of a job.
        rank: Whose messages are sealed.
    """

    def __init__(self, secret: bytes, *, namespace: str, rank: int) -> None:
        self._secret = secret
        self._namespace = namespace
        self._rank = rank
        self.rejected = 0

    def close(self, key: str, text: str) -> str:
        """Seal a text that is to be written under a key."""
        return f"{self._mark(key, self._rank, text)} {self._rank} {text}"

    def open(self, key: str, sealed: bytes) -> Message | None:
        """What a sealed text says that was found under a key; ``None`` if no rank of this run has written it there."""
        message = self._read(key, sealed)
        if message is None and sealed:  # an empty one says that nobody has written yet
            self._reject(key)
        return message

    def _read(self, key: str, sealed: bytes) -> Message | None:
        try:
            mark, sender, text = sealed.decode().split(" ", 2)
            rank = int(sender)
        except ValueError:  # also for what is no text
            return None
        genuine = hmac.compare_digest(mark.encode(), self._mark(key, rank, text).encode())
        return Message(rank, text) if genuine else None

    def _mark(self, key: str, sender: int, text: str) -> str:
        content = f"{len(self._namespace)} {self._namespace}{len(key)} {key}{sender} {text}"  # no two contents are the same
        return hmac.digest(self._secret, content.encode(), "sha256").hex()

    def _reject(self, key: str) -> None:
        self.rejected += 1
        if self.rejected == 1:
            log.warning(
                "somebody who does not have this run's secret has written to %s/%s in the control store; this is"
                " ignored, and so is what follows, without another word",
                self._namespace, key,
            )  # fmt: skip
