# Makes this package known to any OpenMMLab config that lists this file among its `_base_`. Nothing else
# stands here: mmengine refuses a key that two `_base_` files set.
custom_imports = dict(imports=['mmunorm'], allow_failed_imports=False)
