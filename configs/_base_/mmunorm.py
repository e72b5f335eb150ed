# Makes this package known to any OpenMMLab config that lists this file among its `_base_`.
custom_imports = dict(imports=['mmunorm'], allow_failed_imports=False)
# Says so, once, when a run is too short for the warm-up of its UN layers.
custom_hooks = [dict(type='UNWarmupHook')]
