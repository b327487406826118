"""OpenGL without a screen: selects the backend of MuJoCo before it is imported.

MuJoCo and dm_control read the environment variable MUJOCO_GL once, when they are imported, and
fail there on a backend that does not work. So the libraries are tried first, through ctypes only.
"""

import ctypes
import os
import sys
from collections.abc import Callable

VARIABLE = "MUJOCO_GL"
_RENDER_MODULE = "dm_control._render"  # reads the variable, once
PACKAGES = {"egl": "libegl1 libgl1", "osmesa": "libosmesa6"}  # of Debian and Ubuntu

_DEVICE = 0x313F  # EGL_PLATFORM_DEVICE_EXT
_SURFACE, _PBUFFER = 0x3033, 0x0001
_RENDERABLE, _OPENGL = 0x3040, 0x0008
_NONE = 0x3038
_RGBA = 0x1908  # OSMESA_RGBA


def select_backend() -> None:
    """Set MUJOCO_GL to a backend that works: EGL, else OSMesa.

    A value set by the user stays. Nothing is done on other systems than Linux, where MuJoCo has
    its own default, or after dm_control has read the variable.
    """
    # dm_control would render with OSMesa in a thread, which has ended when it is to clean up.
    os.environ.setdefault("DISABLE_RENDER_THREAD_OFFLOADING", "1")
    # Mesa without a GPU renders with a thread per core. A frame of 64 x 64 is faster in the calling
    # thread, and the other cores have environments of their own.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if os.environ.get(VARIABLE) or sys.platform != "linux" or _RENDER_MODULE in sys.modules:
        return
    reasons = {}
    for name, check in _BACKENDS.items():
        try:
            check()
        except (OSError, AttributeError, RuntimeError) as error:
            reasons[name] = str(error)
        else:
            os.environ[VARIABLE] = name
            return
    raise RuntimeError(f"no OpenGL to draw with ({_listed(reasons)}). {install_hint()}")


def install_hint() -> str:
    egl, osmesa = (f"apt-get install -y {names}" for names in PACKAGES.values())
    return (
        f"On Debian or Ubuntu: {egl} (or, without EGL: {osmesa}); "
        f"or set {VARIABLE} to egl, osmesa or glfw yourself"
    )


def _check_egl() -> None:
    """Raise if EGL cannot render on a device without a screen."""
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


def _check_osmesa() -> None:
    """Raise if OSMesa cannot render."""
    osmesa = _load("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")
    osmesa.OSMesaCreateContextExt.restype = ctypes.c_void_p
    osmesa.OSMesaDestroyContext.argtypes = [ctypes.c_void_p]
    context = osmesa.OSMesaCreateContextExt(_RGBA, 24, 8, 0, None)
    if not context:
        raise RuntimeError("it makes no context")
    osmesa.OSMesaDestroyContext(context)


_BACKENDS: dict[str, Callable[[], None]] = {"egl": _check_egl, "osmesa": _check_osmesa}


def _load(*names: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"{' or '.join(names)} cannot be loaded")


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
