"What each module of `load` does, in short: examples that were tried first"
import pickle
from fastai.torch_core import TensorImageBW
from fastai.vision.all import AddMaskCodes, FlipItem, Image, L, noop, PILBase, PILImage, Resize, TensorCategory
from fastai.vision.all import TensorImage, TensorMask, test_eq, torch, Transform
from unittest import mock
from fastai_remote.load.equivalence import IMAGE_TFMS, is_idle, Watched, why_stock_changed, why_unknown
from fastai_remote.load.shared_buffers import OutgoingTensor, SharedBuffers
from fastai_remote.load.show import joined_inputs

def test_changes_of_fastai_and_transforms_of_users_are_named():
    w = Watched(PILImage)
    test_eq(w.change(), '')
    with mock.patch.object(PILBase, 'crop', lambda self, box: self, create=True):
        test_eq(w.change(), 'PILImage.crop was replaced')
    with mock.patch.object(PILImage, '__array__', lambda self: 0, create=True):
        test_eq(w.change(), 'PILImage.__array__ was added')
    with mock.patch.object(PILImage, '_tensor_cls', TensorMask):
        test_eq(w.change(), 'PILImage._tensor_cls was replaced')
    with mock.patch.object(Image.Image, 'resize', lambda self, *a: self):
        test_eq(Watched(PILImage).change(), 'PILImage.resize is not what fastai ships')
    w.change()
    test_eq(why_unknown(Resize(8), IMAGE_TFMS, PILImage, TensorCategory), '')
    class Mine(Resize):
        def encodes(self, x:PILImage): return x
    test_eq(why_unknown(Mine(8), IMAGE_TFMS, PILImage), "Mine is not a transform that images can pass undecoded")
    t = FlipItem()
    t.before_call = lambda b, split_idx: None
    test_eq(why_unknown(t, IMAGE_TFMS, PILImage), 'FlipItem.before_call was replaced on the object')
    assert is_idle(Transform(noop)) and not is_idle(Transform(lambda o: o)) and is_idle(AddMaskCodes())
    test_eq(why_stock_changed(), '')

def test_a_grey_batch_is_sent_with_one_channel_and_received_with_three():
    x = torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2)
    y = pickle.loads(pickle.dumps(OutgoingTensor(x, TensorImage, 3)))
    test_eq((type(y), y.shape, y.is_contiguous()), (TensorImage, (2,3,2,2), True))
    test_eq(y[:,2], x[:,0])
    y = pickle.loads(pickle.dumps(OutgoingTensor(x, TensorImage, 3, False)))
    test_eq((type(y), y.shape, y.stride(1)), (TensorImage, (2,3,2,2), 0))
    buffers = SharedBuffers(2)
    x = torch.from_numpy(buffers.allocate(1, 3<<20)).view(3, 1, 1024, 1024)
    x[1] = 7
    p = OutgoingTensor(x[:,0], TensorMask)
    p.buffers = buffers
    y = pickle.loads(pickle.dumps(p))
    test_eq((type(y), y.shape, y.sum()), (TensorMask, (3,1024,1024), 7<<20))
    test_eq((buffers.busy.sum(), pickle.loads(pickle.dumps(buffers))), (0,None))

def test_several_inputs_are_shown_side_by_side():
    sample = TensorImage(torch.rand(3,8,8)),TensorImageBW(torch.rand(1,6,4)),'same'
    (inputs,target), = joined_inputs(L([sample]), 2)
    test_eq((len(inputs), target), (2, 'same'))
    inputs.show(figsize=(2,1))
