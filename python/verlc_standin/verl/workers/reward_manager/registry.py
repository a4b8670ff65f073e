"""Names of reward managers of the older form."""

REWARD_MANAGER_REGISTRY = {}


def register(name):
    def decorator(cls):
        if REWARD_MANAGER_REGISTRY.setdefault(name, cls) is not cls:
            raise ValueError(f"reward manager {name} is registered already, as {REWARD_MANAGER_REGISTRY[name]}")
        return cls
    return decorator


def get_reward_manager_cls(name):
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(f"no reward manager is registered as {name}; there are {', '.join(REWARD_MANAGER_REGISTRY)}")
    return REWARD_MANAGER_REGISTRY[name]
