"""verl.utils.ray_utils under verlc, as far as it is about asyncio."""

import asyncio


def get_event_loop():
    """The running loop, else this thread's, which is made where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
