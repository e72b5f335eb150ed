"""ONNX Runtime with Qualcomm's QNN provider, which emulates the chip on x86."""
import onnxruntime
import onnxruntime_qnn as qnn
from protocol import serve


class Qualcomm:

    def open(self, model, options=()):
        """Opens an ONNX file; `options` are those of the provider. Raises if a part of it would run on the CPU."""
        onnxruntime.register_execution_provider_library(qnn.EP_NAME, qnn.get_library_path())
        settings = onnxruntime.SessionOptions()
        settings.add_session_config_entry('session.disable_cpu_ep_fallback', '1')
        device = next(device for device in onnxruntime.get_ep_devices() if device.ep_name == qnn.EP_NAME)
        settings.add_provider_for_devices([device], {'backend_path': qnn.get_qnn_htp_path(), **dict(options)})
        self.session = onnxruntime.InferenceSession(model, settings)
        return {}, ()

    def run(self, images):
        name, = (value.name for value in self.session.get_inputs())
        return {}, self.session.run(None, {name: images})


if __name__ == '__main__':
    serve(Qualcomm())
