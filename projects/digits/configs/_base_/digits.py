# Registers the data set and the optimizer wrapper of this project.
custom_imports = dict(imports=['mmunorm', 'projects.digits.digits'], allow_failed_imports=False)
