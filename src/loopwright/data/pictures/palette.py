"""One color for each class id, the same in every picture of every run.

None of the 200 is near grey, black or white. Each is the farthest from all before it in CIELAB, so the first ones
differ most, and the color of an id does not depend on the number of classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loopwright.data.pictures.canvas import Color

_COLORS = bytes.fromhex(
    "e6191900ff006900ff1ed2ff5a6900ff87e13cf0a50078ffffd200ffd2b4963c4bff00f04b5a87007869ff007896d22db46900872db4"
    "d2c3f0a5e1c300962dff8778c3c36996785aa51e783ca5ff9678d2ff1eb400e15af096b4004bffff7800ffb46900f0f0c31e3c0f87a5"
    "69a569b49600e169ff965a87a50fe1005ab4b43c0f96e17800692d874b1effa500ff699600b496d2d23c8769ff69960087f000c300b4"
    "5a693ca5873cb4b487ff004b5ab4b4873c96e1a5f08796d2ff874b3cb400b41e5affd25a4b4bc3a5e1ffc3785ad269a5c38787c369d2"
    "ff5a5a0078b4b44b3c78c3ff00b4694b872d78f0c387964bf03c96d269785a87f0ff5ae1ffc3d200d200b4e196d2a578c3e100b487a5"
    "87f05aff4b00c3e169785a00f05a2d874bff699678b487ffa5a5ff4bd2690f5af069b4d2e1962d69e1f0878700d24bb4f03c6969b45a"
    "694b96874b3c965a699678b4ffa5a5693cd2f0b4e1d2e1b4a5b43cffd287965ad2e100ffb469b4d22de1a52da5d2874bc31e1eff0fd2"
    "00f08700875a5a78c3ff96d2d2a54bffa587a500ffff87ffb44bf000690078e196785a2dff000096b400a53c69e196ffd2693ca57800"
    "00ff4b7878f000a5e1d25a005ad2c34b783ce1b40f69b42de1d296964b001e6978d20f9687875a69c39600f0d2ff7887b4a53c3c694b"
    "f0871eff5ac3d24b87a52d3c00873c96c35a5a2df05a96c37878a596c396d24b3cd24b690fd2a5d287c3d24bd23c87873c870069f03c"
    "ff785aa51ec3ff5affff69b496b4e1e1d200d2006900b43ca5a50096b4ffc30f78a5692d4b7896e1a596c3a5e178d200b4f00069871e"
    "a54b873c9678"
)
NUM_COLORS = len(_COLORS) // 3
# For ids below 0, which belong to no class.
NO_CLASS: Color = (128, 128, 128)


def color_of(class_id: int) -> Color:
    """Return the color of a class. After 200 classes they repeat; an id below 0 is grey."""
    if class_id < 0:
        return NO_CLASS
    red, green, blue = palette()[class_id % NUM_COLORS].tolist()
    return red, green, blue


def palette() -> npt.NDArray[np.uint8]:
    """Return the 200 colors by class id, shape (200, 3), read-only."""
    return np.frombuffer(_COLORS, np.uint8).reshape(-1, 3)
