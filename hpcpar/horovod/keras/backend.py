"""The backend of Keras: torch, chosen before keras is imported, or refused after it."""

from __future__ import annotations

import os
import sys

from hpcpar.errors import HpcparError
from hpcpar.launch.keras_variables import BACKEND, prefer_torch


class KerasBackendError(HpcparError, ImportError):
    """Keras is not installed, or computes by another library than torch."""


def require_torch() -> None:
    """Import keras with its torch backend.

    errors   KerasBackendError where keras is not there, is older than 3 or has another backend
    """
    if "keras" not in sys.modules:
        prefer_torch(os.environ)
    try:
        import keras
    except ImportError as error:
        raise KerasBackendError(
            f"hpcpar.horovod.keras needs Keras 3 with its torch backend, and `import keras` failed: {error}. "
            f"`pip install hpcpar[keras]`, and set {BACKEND}=torch in the environment of the job"
        ) from error
    if int(keras.__version__.partition(".")[0]) < 3:
        raise KerasBackendError(
            f"hpcpar.horovod.keras needs Keras 3; found {keras.__version__}: `pip install hpcpar[keras]`"
        )
    found = keras.backend.backend()
    if found != "torch":
        raise KerasBackendError(
            f"Keras computes by {found} in this process, and hpcpar reduces the gradients of torch: set "
            f"{BACKEND}=torch in the environment of the job, or before the first `import keras` write\n"
            f'    import os; os.environ["{BACKEND}"] = "torch"'
        )
