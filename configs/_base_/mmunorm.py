# Registers this package for any OpenMMLab config that lists this file in its `_base_`. It sets no other keys, because
# mmengine does not allow two `_base_` files to set the same key.
custom_imports = dict(imports=['mmunorm'], allow_failed_imports=False)
