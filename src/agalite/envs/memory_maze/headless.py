"""Drawing without a screen: which OpenGL MuJoCo shall use, found out before it is imported.

MuJoCo and dm_control read the environment variable MUJOCO_GL once, while they are imported, and a
wrong value is an error in the middle of that. So the libraries are asked first, with nothing but
ctypes.
"""

import ctypes
import os
import sys
from collections.abc import Callable

VARIABLE = "MUJOCO_GL"
_DRAWS = "dm_control._render"  # reads the variable, once
PACKAGES = {"egl": "libegl1 libgl1", "osmesa": "libosmesa6"}  # of Debian and Ubuntu

_DEVICE = 0x313F  # EGL_PLATFORM_DEVICE_EXT
_SURFACE, _PBUFFER = 0x3033, 0x0001
_RENDERABLE, _OPENGL = 0x3040, 0x0008
_NONE = 0x3038
_RGBA = 0x1908  # OSMESA_RGBA


def choose() -> None:
    """Set MUJOCO_GL to what works here: EGL, else OSMesa. What the user has set stays.

    Elsewhere than on Linux MuJoCo knows best, and once dm_control draws the choice is made.
    """
    # dm_control would draw with OSMesa in a thread, which is gone before it is asked to clean up.
    os.environ.setdefault("DISABLE_RENDER_THREAD_OFFLOADING", "1")
    # Mesa without a GPU draws with as many threads as there are cores; a frame of 64 x 64 is drawn
    # sooner by the one that asks for it, and the other cores have environments of their own.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if os.environ.get(VARIABLE) or sys.platform != "linux" or _DRAWS in sys.modules:
        return
    reasons = {}
    for name, ask in _WAYS.items():
        try:
            ask()
        except (OSError, AttributeError, RuntimeError) as error:
            reasons[name] = str(error)
        else:
            os.environ[VARIABLE] = name
            return
    raise RuntimeError(f"no OpenGL to draw with ({_listed(reasons)}). {advice()}")


def advice() -> str:
    egl, osmesa = (f"apt-get install -y {names}" for names in PACKAGES.values())
    return (
        f"On Debian or Ubuntu: {egl} (or, without EGL: {osmesa}); "
        f"or set {VARIABLE} to egl, osmesa or glfw yourself"
    )


def _ask_egl() -> None:
    """Raises what is wrong with EGL on a device without a screen."""
    egl = _load("libEGL.so.1")
    _load("libOpenGL.so.0", "libGL.so.1")

    def function(name: str, *arguments: type, result: type) -> Callable[..., int]:
        address = egl.eglGetProcAddress(name.encode())
        if not address:
            raise RuntimeError(f"it lacks {name}")
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    whole, pointer = ctypes.c_int32, ctypes.c_void_p
    devices_of = function("eglQueryDevicesEXT", whole, pointer, pointer, result=ctypes.c_uint)
    display_of = function("eglGetPlatformDisplayEXT", whole, pointer, pointer, result=pointer)
    start = function("eglInitialize", pointer, pointer, pointer, result=ctypes.c_uint)
    stop = function("eglTerminate", pointer, result=ctypes.c_uint)
    configs = function(
        "eglChooseConfig", pointer, pointer, pointer, whole, pointer, result=ctypes.c_uint
    )

    devices, count = (pointer * 32)(), whole(0)
    if not devices_of(len(devices), devices, ctypes.byref(count)):
        raise RuntimeError("it finds no devices")
    wanted = (whole * 5)(_SURFACE, _PBUFFER, _RENDERABLE, _OPENGL, _NONE)
    for device in devices[: count.value]:
        display = display_of(_DEVICE, device, None)
        if display and start(display, None, None):
            found = whole(0)
            configs(display, wanted, None, 0, ctypes.byref(found))
            stop(display)
            if found.value:
                return
    raise RuntimeError("none of its devices draws OpenGL")


def _ask_osmesa() -> None:
    """Raises what is wrong with OSMesa."""
    osmesa = _load("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")
    osmesa.OSMesaCreateContextExt.restype = ctypes.c_void_p
    osmesa.OSMesaDestroyContext.argtypes = [ctypes.c_void_p]
    context = osmesa.OSMesaCreateContextExt(_RGBA, 24, 8, 0, None)
    if not context:
        raise RuntimeError("it makes no context")
    osmesa.OSMesaDestroyContext(context)


_WAYS: dict[str, Callable[[], None]] = {"egl": _ask_egl, "osmesa": _ask_osmesa}


def _load(*names: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"{' or '.join(names)} cannot be loaded")


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
