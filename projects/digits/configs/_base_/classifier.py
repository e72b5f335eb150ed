# Base of the digits classifiers: two minutes of training on 2 CPU cores.
_base_ = ['./digits_imagenet.py', './classifier_run.py']
