"""Asks Google's metadata server about this virtual machine.

Protocol: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import os
import time

from mpistrat.liveness.bounded_waits import within
from mpistrat.settings import Environment

HOST = "GCE_METADATA_HOST"  # "metadata.google.internal", "127.0.0.1:8080"
ADDRESS = "GCE_METADATA_IP"  # "169.254.169.254"; TensorFlow's client reads this variable
_FLAVOR = {"Metadata-Flavor": "Google"}  # a header of requests and of answers
_TRIES = 3  # while the server is busy
_SECONDS_PER_TRY = 2.0
# Timeout of the whole call. The timeout of a try limits neither the look-up of the name nor an answer that comes byte
# by byte.
_SECONDS = 7.0
_MOST_BYTES = 1 << 20


def read_metadata(path: str, environ: Environment = os.environ) -> str | None:
    """Ask Google's metadata server for a value, and return its text. The server knows this virtual machine.

    Called by: the search for the TPU slice, and the watcher for a preemption on Google Compute Engine.
    Args: path: the path below computeMetadata/v1/, such as "instance/attributes/tpu-env".
    Returns: None if the server answers that it has no such value (HTTP 404).
    Raises: OSError, within 7 seconds, if the server does not answer, or answers with another error.
    """
    host = environ.get(HOST) or environ.get(ADDRESS) or "metadata.google.internal"
    url = f"http://{host}/computeMetadata/v1/{path}"
    no_answer = TimeoutError(f"no answer within {_SECONDS:g} s")
    answers: list[str | OSError | None] = [no_answer]
    within(_SECONDS, lambda: answers.append(_answer(url)))
    answer = answers[-1]
    if isinstance(answer, OSError):
        raise OSError(f"{url}: {answer}") from answer
    return answer


def _answer(url: str) -> str | OSError | None:
    import http.client  # imported here, so that `import mpistrat` stays fast
    import urllib.error
    import urllib.request

    # Without http_proxy, because a proxy would not return this machine's metadata.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(_TRIES):
        time.sleep(0.3 * attempt)
        try:
            request = urllib.request.Request(url, headers=_FLAVOR)
            with opener.open(request, timeout=_SECONDS_PER_TRY) as answer:
                if answer.headers.get("Metadata-Flavor") != _FLAVOR["Metadata-Flavor"]:
                    return OSError("the answer is not from Google's metadata server")
                return answer.read(_MOST_BYTES).decode(errors="replace")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            trouble: OSError = error
            is_busy = error.code >= 500 or error.code == 429
        except OSError as error:  # the `reason` of a URLError is its cause
            trouble = error
            is_busy = isinstance(getattr(error, "reason", error), TimeoutError)
        except (http.client.HTTPException, ValueError) as error:
            return OSError(str(error))
        if not is_busy:
            break
    return trouble
