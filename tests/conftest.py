from hypothesis import settings

# Examples are drawn from a fixed seed, so that a red run stays red; deadlines would time the first compile.
settings.register_profile("samebits", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("samebits")
