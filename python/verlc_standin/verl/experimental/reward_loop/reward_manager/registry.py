"""Names of reward managers: @register("name") before a class, and back."""

REWARD_MANAGER = {}


def register(name):
    def decorator(cls):
        if REWARD_MANAGER.setdefault(name, cls) is not cls:
            raise ValueError(f"reward manager {name} is registered already, as {REWARD_MANAGER[name]}")
        return cls
    return decorator


def get_reward_manager_cls(name):
    if name not in REWARD_MANAGER:
        raise ValueError(f"no reward manager is registered as {name}; there are {', '.join(REWARD_MANAGER)}")
    return REWARD_MANAGER[name]
