# CIFAR-100, the Python version, in data/cifar100/cifar-100-python; otherwise as for CIFAR-10.
_base_ = ['./t2t_vit_14_un_cifar10.py']

model = dict(head=dict(num_classes=100))
data_preprocessor = dict(
    num_classes=100, mean=[129.304, 124.070, 112.434], std=[68.170, 65.392, 70.418])

train_dataloader = dict(dataset=dict(type='CIFAR100', data_root='data/cifar100'))
val_dataloader = dict(dataset=dict(type='CIFAR100', data_root='data/cifar100'))
test_dataloader = val_dataloader
