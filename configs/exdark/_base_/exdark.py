# ExDark, 12 classes in the dark, as `python tools/dataset/exdark_to_coco.py data/exdark` writes it. Its own split:
# it is trained on train and val, 4800 pictures, and tested on test, 2563.
metainfo = dict(
    classes=('Bicycle', 'Boat', 'Bottle', 'Bus', 'Car', 'Cat', 'Chair', 'Cup', 'Dog', 'Motorbike', 'People', 'Table'))
data_root = 'data/exdark/'
val_evaluator = dict(ann_file=data_root + 'annotations/test.json')
test_evaluator = val_evaluator
