"""The t-product algebra of third-order tensors, dense, as small public functions.

Products of tubes are circular convolutions; in the Fourier domain they are products of slices.
"""

from __future__ import annotations

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from toffee_dist.errors import InputError

Tensor = NDArray[np.floating]


def tproduct(A: Tensor, B: Tensor) -> Tensor:
    """Return A∗B: C(:,:,t) = Σ_s A(:,:,s)·B(:,:,(t−s) mod T).

    Parameters
    ----------
    A, B : (n, m, T), (m, p, T), real

    Returns
    -------
    (n, p, T)
    """
    if A.ndim != 3 or B.ndim != 3 or A.shape[1] != B.shape[0] or A.shape[2] != B.shape[2]:
        raise InputError(
            "t-product of shapes",
            got=(A.shape, B.shape),
            allowed="(n,m,T) and (m,p,T)",
            remedy="Order the axes as rows, columns, steps.",
        )
    n_steps = A.shape[2]
    A_hat, B_hat = scipy.fft.rfft(A, axis=2), scipy.fft.rfft(B, axis=2)
    C_hat = np.einsum("imk,mjk->ijk", A_hat, B_hat, optimize=True)
    return np.asarray(scipy.fft.irfft(C_hat, n=n_steps, axis=2))


def ttranspose(A: Tensor) -> Tensor:
    """Return Aᵀ: every snapshot transposed, snapshots 1 … T−1 in reverse order.

    In the Fourier domain it is the conjugate transpose of every slice, so (A∗B)ᵀ = Bᵀ∗Aᵀ.
    """
    if A.ndim != 3:
        raise InputError(
            "t-transpose of shape",
            got=A.shape,
            allowed="(n, m, T)",
            remedy="Order the axes as rows, columns, steps.",
        )
    swapped = A.transpose(1, 0, 2)
    return np.concatenate([swapped[:, :, :1], swapped[:, :, :0:-1]], axis=2)
