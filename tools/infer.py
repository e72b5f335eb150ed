"""Draws a model's predictions, boxes and masks or the class, and writes them as JSON."""
import argparse

from mmunorm.checkpoints.loading import load_weights
from mmunorm.cli.arguments import (
    add_config_arguments,
    add_device_argument,
    command,
    fraction,
    load_config,
    out_folder,
    positive,
)
from mmunorm.cli.images import draw_images, draw_objects, find_images
from mmunorm.config.models import clear_build_errors, load_model, match_folded
from mmunorm.deploy.preprocessing import loading_of
from mmunorm.utils import PreflightError, plural

import numpy as np
from mmengine.registry import MODELS, TRANSFORMS


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('images', help='an image, or a folder that is searched for images')
    parser.add_argument('--out-dir', required=True, help='folder for the drawn images; preds/NAME.json in it has '
                        'the predictions of an image')
    parser.add_argument('--no-save-pred', action='store_true', help='write no predictions as JSON')
    parser.add_argument('--pred-score-thr', '--score-thr', type=fraction, default=0.3,
                        help='draw objects with at least this score (default: %(default)s); the JSON files have all')
    parser.add_argument('--limit', type=positive, help='draw only the first LIMIT images of a folder')
    add_device_argument(parser)
    add_config_arguments(parser)
    return parser.parse_args(argv)


class Detector:
    """mmdet's detector."""

    def __init__(self, cfg, checkpoint, device, score_thr):
        from mmdet.apis import inference_detector, init_detector
        from mmdet.structures.mask import encode_mask_results
        self.encode_masks = encode_mask_results
        self.infer = inference_detector
        self.model = init_detector(cfg, checkpoint, device=device)
        load_weights(self.model, checkpoint)  # mmdet would accept one of another model
        self.score_thr = score_thr
        self.best_scores = []

    def predict(self, path, image):
        found = self.infer(self.model, str(path)).pred_instances.cpu().numpy()
        self.best_scores.append(found.scores.max(initial=0))
        shown = found[found.scores >= self.score_thr]
        drawn = draw_objects(image, self.model.dataset_meta['classes'], shown.labels, shown.scores, shown.bboxes,
                             shown.get('masks'))
        return drawn, self._prediction(found)

    def summarize(self):
        """Prints how many images have no object that was drawn."""
        empty = [best for best in self.best_scores if best < self.score_thr]
        if empty:
            print(f'{len(empty)} of {plural(len(self.best_scores), "image")}: 0 objects from {self.score_thr}, best '
                  f'{max(empty):.2f} (lower --pred-score-thr)')

    def _prediction(self, found):
        """As mmdet's DetInferencer writes it: masks in COCO's run-length encoding."""
        prediction = {key: found[key].tolist() for key in ('labels', 'scores', 'bboxes')}
        if 'masks' in found:
            encoded = self.encode_masks(found.masks)
            prediction['masks'] = [{**mask, 'counts': mask['counts'].decode()} for mask in encoded]
        return prediction


class Classifier:
    """mmpretrain's classifier."""

    def __init__(self, cfg, checkpoint, device):
        from mmpretrain import ImageClassificationInferencer
        self.inferencer = ImageClassificationInferencer(cfg, pretrained=checkpoint, device=device)
        load_weights(self.inferencer.model, checkpoint)  # mmpretrain would accept one of another model
        # Data sets of arrays, such as CIFAR, are RGB; mmcv loads files as BGR.
        pipeline = cfg.test_dataloader.dataset.pipeline
        self.load = next((TRANSFORMS.build(step) for step in pipeline if step.type.endswith('LoadImageFromFile')), None)

    def predict(self, path, image):
        # mmpretrain would not load the image as the config does.
        loaded = self.load(dict(img_path=str(path)))['img'] if self.load else image[..., ::-1]
        result = self.inferencer.forward(next(self.inferencer.preprocess([loaded])))
        prediction, = self.inferencer.postprocess(result, [])
        drawn = draw_objects(image, self.inferencer.classes, np.array([prediction['pred_label']]),
                             prediction['pred_scores'])
        return drawn, {**prediction, 'pred_scores': prediction['pred_scores'].tolist()}


class ModelDrawing:
    """A model with its own `draw(image)`, which returns the drawing; both are uint8 BGR `(h, w, 3)`."""

    def __init__(self, cfg, checkpoint, device):
        self.model = load_model(cfg, checkpoint).to(device)

    def predict(self, path, image):
        return self.model.draw(image), None


def build_predictor(cfg, args):
    """The model of the config, with a method `predict`."""
    with clear_build_errors():
        if hasattr(MODELS.get(cfg.model.get('of', cfg.model.type)), 'draw'):
            return ModelDrawing(cfg, args.checkpoint, args.device)
        if cfg.get('default_scope') == 'mmdet':
            return Detector(cfg, args.checkpoint, args.device, args.pred_score_thr)
        if cfg.get('default_scope') == 'mmpretrain':
            return Classifier(cfg, args.checkpoint, args.device)
    raise PreflightError(f"{args.config}: default_scope must be 'mmdet' or 'mmpretrain', or the model must have a "
                         f"draw method; got {cfg.get('default_scope')!r} and {cfg.model.type}.")


@command
def main(argv=None):
    args = parse_args(argv)
    images = find_images(args.images, args.out_dir, args.limit)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    match_folded(cfg, args.checkpoint)
    out_folder(args.out_dir, '--out-dir')
    predictor = build_predictor(cfg, args)
    loading = loading_of(cfg.test_dataloader.dataset.pipeline) if cfg.get('test_dataloader') else {}
    if loading:  # drawn in colour, and turned as the model sees it
        kept = 'color_ignore_orientation' if loading['flag'] == 'unchanged' else loading['flag']
        loading['flag'] = kept.replace('grayscale', 'color')
    draw_images(images, predictor.predict, args.out_dir, not args.no_save_pred, loading)
    if isinstance(predictor, Detector):
        predictor.summarize()


if __name__ == '__main__':
    main()
