/* Replays: the allocations and launches of an earlier call, for new tensors of the same geometry.

   samebits/backends/replay.py records them, and says what a replay is. This file knows nothing of any
   operation. A call costs: a key of the tensors' metadata, one dictionary look-up, the allocations, one copy of
   the launches' parameters with the new addresses, and the launches. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

enum {
    MOST_TENSORS = 48,    /* arguments, and allocations */
    MOST_BYTES = 24576,   /* of all launches' parameters: they are copied onto the stack */
    MOST_RECIPES = 8192,  /* of one operation; more would be made as the program runs */
    MOST_DIMS = 64,       /* of a tensor */
    STRIDED = 0,          /* PyTorch's number of the layout of dense tensors */
    MOST_DEPTH = 2,       /* of tuples in tuples */
    MOST_KEY = 4096,      /* bytes of a key */
    STREAM = 32,          /* where CUlaunchConfig has its stream */
    PARAMS = 128,         /* where the parameters begin, after the CUlaunchConfig */
    INVALID_CONTEXT = 201 /* the driver's error code in a thread without a context */
};

typedef int (*LaunchKernel)(const void* config, void* function, void** params, void** extra);
typedef int (*ReplaceAddress)(void* map, void* address);
typedef int (*SetBytes)(unsigned long long at, unsigned char value, size_t count, void* stream);

/* PyTorch's functions that read a tensor. A tensor of C++ is one pointer, with which Python's object begins. */
typedef struct {
    PyObject_HEAD void* own; /* also `_cdata` */
} TensorObject;
typedef int (*ReadPointer)(void** tensor, void** found);
typedef int (*ReadCount)(void** tensor, int64_t* found);
typedef int (*ReadArray)(void** tensor, int64_t** found);
typedef int (*ReadNumber)(void** tensor, int32_t* found);
typedef bool (*IsTensor)(void** tensor);
typedef bool (*IsOwn)(void* own);

/* Those that say what goes on in this thread. */
typedef bool (*IsOn)(void);
typedef int64_t (*Count)(void);
typedef bool (*IsKey)(uint16_t key);
typedef int (*ReadDevice)(int8_t* device);
typedef int (*ReadStream)(int32_t device, void** stream);

/* What Python knows of the driver and of PyTorch; set by configure(). */
static struct {
    PyObject *tensor, *parameter, *dtype; /* types */
    PyObject *allocate, *make_current, *fail;
    PyObject *watched, *at_rest; /* see is_watched() */
    ReadPointer address;
    ReadCount dims;
    ReadArray sizes, strides;
    ReadNumber dtype_of, layout_of, device_of;
    IsTensor is_neg;
    IsOwn requires_grad;
    IsOn function_modes, grad_enabled;
    Count dispatch_modes;
    IsKey included, excluded;
    ReadDevice device;
    ReadStream stream;
    LaunchKernel launch;
    ReplaceAddress replace_address;
    SetBytes set_bytes;
    uint16_t traced, transformed, autocast[2]; /* keys of PyTorch's dispatcher */
} with;

/* ---- Recipe ---------------------------------------------------------------------------------------------- */

typedef struct {
    Py_ssize_t at; /* in the launch's bytes */
    int tensor;    /* an argument's index; those of allocations follow */
    int is_map;    /* a CUtensorMap, not a pointer */
    int64_t delta; /* from the tensor's first element, in bytes */
} Patch;

typedef struct {
    void* function;  /* NULL: set bytes to zero, as many as `size` */
    Py_ssize_t from; /* in Recipe.bytes */
    Py_ssize_t size; /* a multiple of 128 */
    int patches;
    Patch* patch;
} Launch;

typedef struct {
    int of, to; /* arguments that overlap, or begin at one address */
    int64_t apart;
} Tie;

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    int device, arguments, allocations, launches, ties;
    PyObject* geometries; /* a tuple of (shape, strides, dtype), one for each allocation; or (function,
                             an argument's index, and what the function takes with that argument) */
    PyObject* kernels;    /* what the launches were of: for errors, and kept alive */
    PyObject* result;     /* the index of a tensor, or a tuple of indices and None */
    Launch* launch;
    Patch* patch;
    Tie* tie;
    Py_ssize_t size;
    unsigned char* bytes;
} Recipe;

static PyObject* recipe_call(Recipe* self, PyObject* const* args, size_t nargsf, PyObject* names);

static void recipe_dealloc(Recipe* self) {
    Py_XDECREF(self->geometries);
    Py_XDECREF(self->kernels);
    Py_XDECREF(self->result);
    PyMem_Free(self->launch);
    PyMem_Free(self->patch);
    PyMem_Free(self->tie);
    PyMem_Free(self->bytes);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

/* Recipe(device, arguments, geometries, launches, kernels, result, ties). A tie (of, to, apart) says how many
   bytes apart two arguments begin. A launch is (function, bytes, patches), a
   patch (at, tensor, is_map, delta). To set bytes to zero is (0, count, (patch,)). */
static PyObject* recipe_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    int device, arguments;
    PyObject *geometries, *launches, *kernels, *result, *ties = NULL;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Recipe takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iiO!O!O!O|O!", &device, &arguments, &PyTuple_Type, &geometries,
                          &PyTuple_Type, &launches, &PyTuple_Type, &kernels, &result, &PyTuple_Type, &ties))
        return NULL;
    Recipe* self = (Recipe*)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = (vectorcallfunc)recipe_call;
    self->device = device;
    self->arguments = arguments;
    self->allocations = (int)PyTuple_GET_SIZE(geometries);
    self->launches = (int)PyTuple_GET_SIZE(launches);
    self->geometries = Py_NewRef(geometries);
    self->kernels = Py_NewRef(kernels);
    self->result = Py_NewRef(result);
    if (arguments + self->allocations > MOST_TENSORS) {
        PyErr_SetString(PyExc_ValueError, "Recipe: too many tensors");
        goto failed;
    }
    Py_ssize_t patches = 0;
    for (int i = 0; i < self->launches; i++) {
        unsigned long long function;
        PyObject *bytes, *of;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(launches, i), "KOO!", &function, &bytes, &PyTuple_Type, &of))
            goto failed;
        patches += PyTuple_GET_SIZE(of);
        if (function != 0) {
            if (!PyBytes_Check(bytes)) {
                PyErr_SetString(PyExc_TypeError, "Recipe: a launch has bytes");
                goto failed;
            }
            self->size += (PyBytes_GET_SIZE(bytes) + 127) / 128 * 128;
        }
    }
    if (self->size > MOST_BYTES) {
        PyErr_SetString(PyExc_ValueError, "Recipe: too many bytes");
        goto failed;
    }
    self->launch = PyMem_Calloc(self->launches + 1, sizeof(Launch));
    self->patch = PyMem_Calloc(patches + 1, sizeof(Patch));
    self->bytes = PyMem_Calloc(self->size + 1, 1);
    self->ties = ties == NULL ? 0 : (int)PyTuple_GET_SIZE(ties);
    self->tie = PyMem_Calloc(self->ties + 1, sizeof(Tie));
    if (self->tie == NULL || self->launch == NULL || self->patch == NULL || self->bytes == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    Patch* next = self->patch;
    Py_ssize_t from = 0;
    for (int i = 0; i < self->launches; i++) {
        unsigned long long function;
        PyObject *bytes, *of;
        Launch* launch = &self->launch[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(launches, i), "KOO", &function, &bytes, &of)) goto failed;
        launch->function = (void*)(uintptr_t)function;
        launch->from = from;
        if (function != 0) {
            memcpy(self->bytes + from, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
            launch->size = (PyBytes_GET_SIZE(bytes) + 127) / 128 * 128;
            from += launch->size;
        } else {
            launch->size = PyLong_AsSsize_t(bytes);
            if (launch->size < 0) goto failed;
        }
        launch->patch = next;
        launch->patches = (int)PyTuple_GET_SIZE(of);
        for (int j = 0; j < launch->patches; j++, next++) {
            long long delta;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(of, j), "nipL", &next->at, &next->tensor, &next->is_map,
                                  &delta))
                goto failed;
            next->delta = delta;
            Py_ssize_t needed = next->at + (next->is_map ? 128 : 8);
            int in_launch = function == 0 || (next->at >= 0 && needed <= launch->size);
            if (!in_launch || next->tensor < 0 || next->tensor >= arguments + self->allocations) {
                PyErr_SetString(PyExc_ValueError, "Recipe: a patch is out of range");
                goto failed;
            }
        }
    }
    for (int i = 0; i < self->ties; i++) {
        Tie* tie = &self->tie[i];
        long long apart;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(ties, i), "iiL", &tie->of, &tie->to, &apart)) goto failed;
        tie->apart = apart;
        if (tie->of < 0 || tie->of >= arguments || tie->to < 0 || tie->to >= arguments) goto failed;
    }
    return (PyObject*)self;
failed:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Recipe: wrong arguments");
    Py_DECREF(self);
    return NULL;
}

static PyTypeObject RecipeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "samebits.backends._replay.Recipe",
    .tp_basicsize = sizeof(Recipe),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Recipe, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = recipe_new,
    .tp_dealloc = (destructor)recipe_dealloc,
    .tp_doc = "The allocations and launches of a call.",
};

static int is_tensor(PyObject* x) {
    PyObject* type = (PyObject*)Py_TYPE(x);
    return type == with.tensor || type == with.parameter;
}

/* The allocations of a call, and addresses of its arguments and of them. */
typedef struct {
    int count;
    PyObject* made[MOST_TENSORS];
    uintptr_t at[MOST_TENSORS];
} Tensors;

static void** own_of(PyObject* tensor) { return &((TensorObject*)tensor)->own; }

static int address_of(PyObject* tensor, uintptr_t* at) {
    void* found;
    if (with.address(own_of(tensor), &found)) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor has no address");
        return -1;
    }
    *at = (uintptr_t)found;
    return 0;
}

static PyObject* one_of(const Recipe* recipe, const Tensors* tensors, PyObject* const* args,
                        PyObject* index) {
    if (index == Py_None) return Py_NewRef(Py_None);
    long i = PyLong_AsLong(index);
    if (i < 0 || i >= recipe->arguments + recipe->allocations) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Recipe: a result is out of range");
        return NULL;
    }
    return Py_NewRef(i < recipe->arguments ? args[i] : tensors->made[i - recipe->arguments]);
}

/* Run launches from `*i` on, on a copy of their bytes. An error's code comes back, and `*i` is whose it is. */
static int run_from(int* i, const Recipe* recipe, const Tensors* tensors, void* stream,
                    unsigned char* bytes) {
    int code = 0;
    Py_BEGIN_ALLOW_THREADS for (; *i < recipe->launches; ++*i) {
        const Launch* launch = &recipe->launch[*i];
        unsigned char* own = bytes + launch->from;
        for (int j = 0; launch->function != NULL && j < launch->patches && code == 0; j++) {
            const Patch* patch = &launch->patch[j];
            uintptr_t to = tensors->at[patch->tensor] + (uintptr_t)patch->delta;
            if (patch->is_map)
                code = with.replace_address(own + patch->at, (void*)to);
            else
                memcpy(own + patch->at, &to, sizeof to);
        }
        if (code != 0) break;
        if (launch->function == NULL) {
            uintptr_t to = tensors->at[launch->patch->tensor] + (uintptr_t)launch->patch->delta;
            code = with.set_bytes(to, 0, launch->size, stream);
        } else {
            void* params = own + PARAMS;
            memcpy(own + STREAM, &stream, sizeof stream);
            code = with.launch(own, launch->function, &params, NULL);
        }
        if (code != 0) break;
    }
    Py_END_ALLOW_THREADS return code;
}

static int run_launches(const Recipe* recipe, const Tensors* tensors) {
    void* stream;
    if (with.stream(recipe->device, &stream)) {
        PyErr_SetString(PyExc_RuntimeError, "a device has no stream");
        return -1;
    }
    alignas(128) unsigned char bytes[MOST_BYTES];
    memcpy(bytes, recipe->bytes, recipe->size);
    int i = 0, code = run_from(&i, recipe, tensors, stream, bytes);
    if (code == INVALID_CONTEXT) {
        PyObject* made = PyObject_CallFunction(with.make_current, "i", recipe->device);
        if (made == NULL) return -1;
        Py_DECREF(made);
        code = run_from(&i, recipe, tensors, stream, bytes);
    }
    if (code == 0) return 0;
    PyObject* kernel = PyTuple_GET_ITEM(recipe->kernels, i);
    PyObject* none = PyObject_CallFunction(with.fail, "iO", code, kernel);
    Py_XDECREF(none);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a launch failed");
    return -1;
}

/* Whether arguments overlap as in the call that was recorded, where that decides whose a pointer is. */
static int is_tied(const Recipe* recipe, const Tensors* tensors) {
    for (int i = 0; i < recipe->ties; i++) {
        const Tie* tie = &recipe->tie[i];
        if ((int64_t)(tensors->at[tie->to] - tensors->at[tie->of]) != tie->apart) return 0;
    }
    return 1;
}

/* An allocation, or a view of an argument, by a function that makes such. */
static PyObject* made_as(const Recipe* recipe, PyObject* geometry, PyObject* const* args) {
    PyObject** of = ((PyTupleObject*)geometry)->ob_item;
    if (PyTuple_GET_SIZE(geometry) != 5) return PyObject_Vectorcall(with.allocate, of, 3, NULL);
    long i = PyLong_AsLong(of[1]);
    if (i < 0 || i >= recipe->arguments) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Recipe: a view is of no argument");
        return NULL;
    }
    PyObject* given[] = {args[i], of[2], of[3], of[4]};
    return PyObject_Vectorcall(of[0], given, 4, NULL);
}

static PyObject* replay(const Recipe* recipe, Tensors* tensors, PyObject* const* args) {
    PyObject* result = NULL;
    for (; tensors->count < recipe->allocations; tensors->count++) {
        PyObject* geometry = PyTuple_GET_ITEM(recipe->geometries, tensors->count);
        PyObject* made = made_as(recipe, geometry, args);
        if (made == NULL) goto done;
        tensors->made[tensors->count] = made;
        if (address_of(made, &tensors->at[recipe->arguments + tensors->count])) {
            tensors->count++;
            goto done;
        }
    }
    if (run_launches(recipe, tensors)) goto done;
    if (!PyTuple_Check(recipe->result)) {
        result = one_of(recipe, tensors, args, recipe->result);
        goto done;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(recipe->result);
    result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
        PyObject* one = one_of(recipe, tensors, args, PyTuple_GET_ITEM(recipe->result, i));
        if (one == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, i, one);
    }
done:
    for (int i = 0; i < tensors->count; i++) Py_DECREF(tensors->made[i]);
    return result;
}

/* recipe(*args), for arguments that Replay.recipe() found it for, or that differ in their addresses alone.
   NotImplemented: they overlap in another way. */
static PyObject* recipe_call(Recipe* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    Tensors tensors;
    tensors.count = 0;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    if (names != NULL || count != self->arguments) {
        PyErr_Format(PyExc_TypeError, "Recipe takes %d arguments, got %zd", self->arguments, count);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        tensors.at[i] = 0;
        if (is_tensor(args[i]) && address_of(args[i], &tensors.at[i])) return NULL;
    }
    if (!is_tied(self, &tensors)) Py_RETURN_NOTIMPLEMENTED;
    return replay(self, &tensors, args);
}

/* ---- Replay ---------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject *run, *record, *recipes;
    PyObject* questions; /* of public calls, a tuple of functions: they are replayed only if all answer no */
} Replay;

/* All that decides what a call does, but for the addresses. */
typedef struct {
    Py_ssize_t size;
    unsigned char bytes[MOST_KEY];
} Key;

/* Functions that add to a key return 0, or -1, perhaps with an error: there is no key.

   What follows depends on the tag, and its size on that. So two calls of one key have equal parts. */
static int add(Key* key, char tag, const void* bytes, size_t size) {
    if (size >= (size_t)(MOST_KEY - key->size)) return -1;
    key->bytes[key->size++] = (unsigned char)tag;
    if (size) memcpy(key->bytes + key->size, bytes, size);
    key->size += (Py_ssize_t)size;
    return 0;
}

typedef struct {
    uintptr_t address;
    int64_t dims, *sizes, *strides;
    int32_t dtype, device;
} Tensor;

/* -1 of what is not dense, or has no memory of its own. */
static int read_tensor(PyObject* tensor, Tensor* to) {
    void **of = own_of(tensor), *address;
    int32_t layout;
    if (with.layout_of(of, &layout) || layout != STRIDED) return -1;
    if (with.device_of(of, &to->device) || with.dtype_of(of, &to->dtype) || with.dims(of, &to->dims) ||
        with.sizes(of, &to->sizes) || with.strides(of, &to->strides) || with.address(of, &address))
        return -1;
    to->address = (uintptr_t)address;
    int empty = 0;
    for (int64_t d = 0; d < to->dims; d++) empty |= to->sizes[d] == 0;
    return address == NULL && !empty ? -1 : 0;
}

/* `self`: the index of the first argument that is the same object; `recorded`: whether autograd records it. */
static int add_tensor(Key* key, PyObject* tensor, Tensors* tensors, int i, int self, int recorded,
                      int* device) {
    Tensor t;
    if (read_tensor(tensor, &t) || t.dims > MOST_DIMS) return -1;
    if (*device == INT_MIN) *device = t.device;
    if (*device != t.device) return -1; /* on several devices */
    int same = i;
    for (int j = 0; j < i && same == i; j++)
        if (tensors->at[j] == t.address && t.address != 0) same = j;
    tensors->at[i] = t.address;
    unsigned char head[] = {(unsigned char)(t.address & 15), (unsigned char)same,    (unsigned char)self,
                            (unsigned char)recorded,         (unsigned char)t.dtype, (unsigned char)t.dims};
    size_t size = (size_t)t.dims * sizeof *t.sizes;
    if (add(key, 't', head, sizeof head) || add(key, 'n', t.sizes, size)) return -1;
    return add(key, 's', t.strides, size);
}

static int add_text(Key* key, PyObject* text) {
    Py_ssize_t size;
    const char* bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes == NULL || add(key, 'u', &size, sizeof size)) return -1;
    return add(key, '"', bytes, (size_t)size);
}

/* A number, a text, None, or a dtype, of which there is one object each. */
static int add_one(Key* key, PyObject* x) {
    if (x == Py_None) return add(key, 'N', NULL, 0);
    if (PyBool_Check(x)) return add(key, x == Py_True ? 'T' : 'F', NULL, 0);
    if (PyLong_Check(x)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(x, &overflow);
        return overflow ? -1 : add(key, 'i', &value, sizeof value);
    }
    if (PyFloat_CheckExact(x)) {
        double value = PyFloat_AS_DOUBLE(x); /* by its bits: -0.0 is another one than 0.0 */
        return add(key, 'f', &value, sizeof value);
    }
    if (PyUnicode_CheckExact(x)) return add_text(key, x);
    return (PyObject*)Py_TYPE(x) == with.dtype ? add(key, 'd', &x, sizeof x) : -1;
}

/* Such, or a tuple or a list of these, `depth` deep. */
static int add_all(Key* key, PyObject* x, int depth) {
    if (!PyTuple_Check(x) && !PyList_CheckExact(x)) return add_one(key, x);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(x);
    if (depth == 0 || add(key, '(', &count, sizeof count)) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (add_all(key, PySequence_Fast_GET_ITEM(x, i), depth - 1)) return -1;
    return 0;
}

/* The key of a call. NULL, perhaps with an error: there is none. `grad_enabled` is -1 where PyTorch has looked at
   the tensors before. `recorded` becomes 1 if autograd records the call. Calls without gradients have keys of
   their own, as they return no views. */
static PyObject* make_key(PyObject* const* args, Py_ssize_t count, PyObject* names, int grad_enabled,
                          Tensors* tensors, int* device, int* recorded) {
    Key key;
    key.size = 0;
    *device = INT_MIN;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* x = args[i];
        tensors->at[i] = 0;
        if (is_tensor(x)) {
            int one = 0, self = 0;
            if (grad_enabled >= 0 && with.is_neg(own_of(x))) return NULL;
            if (grad_enabled == 1) {
                one = with.requires_grad(*own_of(x));
                while (args[self] != x) self++;
            }
            *recorded |= one;
            if (grad_enabled == 0) one = 2;
            if (add_tensor(&key, x, tensors, (int)i, self, one, device)) return NULL;
        } else if (add_all(&key, x, MOST_DEPTH)) {
            return NULL;
        }
    }
    if (*device == INT_MIN) return NULL; /* no tensor */
    if (add(&key, '@', device, sizeof *device) || (names != NULL && add_all(&key, names, 1))) return NULL;
    return PyBytes_FromStringAndSize((const char*)key.bytes, key.size);
}

static int on_current_device(int device) {
    int8_t current;
    return with.device(&current) == 0 && current == device;
}

static PyObject* recorded(Replay* self, PyObject* key, PyObject* const* args, Py_ssize_t count,
                          PyObject* names, int by_autograd) {
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *given = PyTuple_New(count), *by_name = named ? PyDict_New() : NULL, *pair = NULL,
             *result = NULL;
    if (given == NULL || (named && by_name == NULL)) goto done;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(by_name, PyTuple_GET_ITEM(names, i), args[count + i])) goto done;
    pair = PyObject_CallFunctionObjArgs(self->record, self->run, given, by_name ? by_name : Py_None,
                                        by_autograd ? Py_True : Py_False, NULL);
    if (pair == NULL) goto done;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "Replay: record returns a result and a recipe");
    } else if (PyDict_SetItem(self->recipes, key, PyTuple_GET_ITEM(pair, 1)) == 0) {
        result = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    }
done:
    Py_XDECREF(given);
    Py_XDECREF(by_name);
    Py_XDECREF(pair);
    return result;
}

/* Whether a question is answered by anything but False and -1; 0 is the first backward. Itself -1, with an error. */
static int is_yes(PyObject* question) {
    PyObject* answer = PyObject_CallNoArgs(question);
    if (answer == NULL) return -1;
    int no = answer == Py_False || (PyLong_CheckExact(answer) && PyLong_AsLong(answer) == -1);
    Py_DECREF(answer);
    return !no;
}

/* with.watched(), which is not asked while dictionaries have the very objects that `at_rest` names. */
static int is_watched(void) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(with.at_rest); i++) {
        PyObject** of = ((PyTupleObject*)PyTuple_GET_ITEM(with.at_rest, i))->ob_item;
        if (PyDict_GetItem(of[0], of[1]) != of[2]) return is_yes(with.watched);
    }
    return 0;
}

/* Whether calls may be replayed at all now: 1, 0, or -1 with an error. */
static int may_replay(const Replay* self) {
    if (with.function_modes() || with.dispatch_modes()) return 0;
    if (self->questions == NULL) return 1;
    if (with.included(with.traced) || with.included(with.transformed)) return 0;
    if (!with.excluded(with.autocast[0]) || !with.excluded(with.autocast[1])) return 0;
    int yes = is_watched();
    for (Py_ssize_t i = 0; yes == 0 && i < PyTuple_GET_SIZE(self->questions); i++)
        yes = is_yes(PyTuple_GET_ITEM(self->questions, i));
    return yes < 0 ? -1 : !yes;
}

static PyObject* replay_call(Replay* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    Py_ssize_t count = PyVectorcall_NARGS(nargsf), named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    Tensors tensors;
    tensors.count = 0;
    int device;
    if (with.tensor == NULL || count + named > MOST_TENSORS / 2) goto slow;
    int may = may_replay(self), grad_enabled = self->questions == NULL ? -1 : with.grad_enabled();
    if (may < 0) return NULL;
    if (!may) goto slow;
    int by_autograd = 0;
    PyObject* key = make_key(args, count + named, names, grad_enabled, &tensors, &device, &by_autograd);
    if (key == NULL || !on_current_device(device)) {
        PyErr_Clear(); /* tensors without data, such as sparse ones, have errors for their strides */
        Py_XDECREF(key);
        goto slow;
    }
    PyObject *found = PyDict_GetItemWithError(self->recipes, key), *result;
    if (found != NULL && PyFunction_Check(found)) { /* a plan */
        Py_INCREF(found);
        Py_DECREF(key);
        result = PyObject_Vectorcall(found, args, count + named, NULL);
        Py_DECREF(found);
        return result;
    }
    if (found != NULL && Py_TYPE(found) == &RecipeType && is_tied((Recipe*)found, &tensors)) {
        Py_INCREF(found); /* another thread may empty the dictionary */
        Py_DECREF(key);
        result = replay((Recipe*)found, &tensors, args);
        Py_DECREF(found);
        return result;
    }
    if (found == NULL && !PyErr_Occurred()) { /* a first time: kernels may have to be loaded */
        if (PyDict_GET_SIZE(self->recipes) >= MOST_RECIPES) PyDict_Clear(self->recipes);
        PyDict_SetItem(self->recipes, key, Py_False);
    } else if (found == Py_False) {
        result = recorded(self, key, args, count, names, by_autograd);
        Py_DECREF(key);
        return result;
    }
    Py_DECREF(key);
    if (PyErr_Occurred()) return NULL;
slow:
    return PyObject_Vectorcall(self->run, args, nargsf, names);
}

static int replay_traverse(Replay* self, visitproc visit, void* arg) {
    Py_VISIT(self->run);
    Py_VISIT(self->record);
    Py_VISIT(self->recipes);
    Py_VISIT(self->questions);
    return 0;
}

static int replay_clear(Replay* self) {
    Py_CLEAR(self->run);
    Py_CLEAR(self->record);
    Py_CLEAR(self->recipes);
    Py_CLEAR(self->questions);
    return 0;
}

static void replay_dealloc(Replay* self) {
    PyObject_GC_UnTrack(self);
    replay_clear(self);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

static PyObject* replay_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    PyObject *run, *record, *questions = NULL;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Replay takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO|O!", &run, &record, &PyTuple_Type, &questions)) return NULL;
    Replay* self = (Replay*)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = (vectorcallfunc)replay_call;
    self->run = Py_NewRef(run);
    self->record = Py_NewRef(record);
    self->questions = Py_XNewRef(questions);
    self->recipes = PyDict_New();
    if (self->recipes == NULL) Py_CLEAR(self);
    return (PyObject*)self;
}

/* The recipe of a call. */
static PyObject* replay_recipe(Replay* self, PyObject* const* args, Py_ssize_t count) {
    Tensors tensors;
    int device, by_autograd = 0;
    if (with.tensor == NULL || count > MOST_TENSORS / 2 || self->questions != NULL) Py_RETURN_NONE;
    PyObject* key = make_key(args, count, NULL, -1, &tensors, &device, &by_autograd);
    if (key == NULL) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject* found = PyDict_GetItemWithError(self->recipes, key);
    Py_DECREF(key);
    if (found == NULL && PyErr_Occurred()) return NULL;
    return Py_NewRef(found != NULL && Py_TYPE(found) == &RecipeType ? found : Py_None);
}

static PyMethodDef replay_methods[] = {{"recipe", (PyCFunction)(void (*)(void))replay_recipe, METH_FASTCALL,
                                        "recipe(*args): of a call, or None."},
                                       {NULL}};

static PyMemberDef replay_members[] = {
    {"run", T_OBJECT_EX, offsetof(Replay, run), READONLY, "What is replayed."},
    {"recipes", T_OBJECT_EX, offsetof(Replay, recipes), READONLY,
     "By key: False (seen once), None (cannot be replayed), a Recipe, or a plan: a Python function."},
    {NULL}};

static PyTypeObject ReplayType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "samebits.backends._replay.Replay",
    .tp_basicsize = sizeof(Replay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Replay, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = replay_new,
    .tp_dealloc = (destructor)replay_dealloc,
    .tp_traverse = (traverseproc)replay_traverse,
    .tp_clear = (inquiry)replay_clear,
    .tp_members = replay_members,
    .tp_methods = replay_methods,
    .tp_doc = "A function of tensors, run by the recipe of an earlier call where there is one.",
};

/* ---- The module ------------------------------------------------------------------------------------------ */

/* configure(objects, functions, keys): what `with` has. */
static PyObject* configure(PyObject* self, PyObject* args) {
    (void)self;
    PyObject *objects, *functions, *keys;
    PyObject** to[] = {&with.tensor,       &with.parameter, &with.dtype,   &with.allocate,
                       &with.make_current, &with.fail,      &with.watched, &with.at_rest};
    enum { OBJECTS = sizeof to / sizeof *to, FUNCTIONS = 19, KEYS = 4 };
    size_t at[FUNCTIONS], key[KEYS];
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &objects, &PyTuple_Type, &functions, &PyTuple_Type,
                          &keys))
        return NULL;
    if (PyTuple_GET_SIZE(objects) != OBJECTS || PyTuple_GET_SIZE(functions) != FUNCTIONS ||
        PyTuple_GET_SIZE(keys) != KEYS) {
        PyErr_SetString(PyExc_TypeError, "configure: too few, or too many");
        return NULL;
    }
    for (int i = 0; i < FUNCTIONS; i++) at[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(functions, i));
    for (int i = 0; i < KEYS; i++) key[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(keys, i));
    if (PyErr_Occurred()) return NULL;
    for (int i = 0; i < OBJECTS; i++) Py_XSETREF(*to[i], Py_NewRef(PyTuple_GET_ITEM(objects, i)));
    with.address = (ReadPointer)at[0];
    with.dims = (ReadCount)at[1];
    with.sizes = (ReadArray)at[2];
    with.strides = (ReadArray)at[3];
    with.dtype_of = (ReadNumber)at[4];
    with.layout_of = (ReadNumber)at[5];
    with.device_of = (ReadNumber)at[6];
    with.is_neg = (IsTensor)at[7];
    with.requires_grad = (IsOwn)at[8];
    with.function_modes = (IsOn)at[9];
    with.dispatch_modes = (Count)at[10];
    with.grad_enabled = (IsOn)at[11];
    with.included = (IsKey)at[12];
    with.excluded = (IsKey)at[13];
    with.device = (ReadDevice)at[14];
    with.stream = (ReadStream)at[15];
    with.launch = (LaunchKernel)at[16];
    with.replace_address = (ReplaceAddress)at[17];
    with.set_bytes = (SetBytes)at[18];
    with.traced = (uint16_t)key[0];
    with.transformed = (uint16_t)key[1];
    with.autocast[0] = (uint16_t)key[2];
    with.autocast[1] = (uint16_t)key[3];
    Py_RETURN_NONE;
}

/* No call is replayed until configure() comes again. */
static PyObject* unset(PyObject* self, PyObject* none) {
    (void)self, (void)none;
    Py_CLEAR(with.tensor);
    Py_RETURN_NONE;
}

static PyObject* described(PyObject* self, PyObject* tensor) {
    (void)self;
    Tensor t;
    PyObject* own = PyObject_GetAttrString(tensor, "_cdata");
    if (own == NULL) return NULL;
    int is_own = is_tensor(tensor) && *own_of(tensor) == PyLong_AsVoidPtr(own);
    Py_DECREF(own);
    if (!is_own || read_tensor(tensor, &t)) Py_RETURN_NONE;
    Py_ssize_t size = (Py_ssize_t)(t.dims * sizeof *t.sizes);
    return Py_BuildValue("Kiy#y#NN", (unsigned long long)t.address, (int)t.device, t.sizes, size, t.strides,
                         size, PyBool_FromLong(with.is_neg(own_of(tensor))),
                         PyBool_FromLong(with.requires_grad(*own_of(tensor))));
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Say what the driver and PyTorch are. See pytorch_in_c.py."},
    {"unset", unset, METH_NOARGS, "Forget what configure() said: tensors are not what it took them for."},
    {"described", described, METH_O,
     "A tensor's address, device, shape, strides, is_neg() and requires_grad, as replays read them."},
    {NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT,
                                    "_replay",
                                    "Calls that are replayed. See replay.py.",
                                    -1,
                                    methods,
                                    NULL,
                                    NULL,
                                    NULL,
                                    NULL};

PyMODINIT_FUNC PyInit__replay(void) {
    if (PyType_Ready(&RecipeType) || PyType_Ready(&ReplayType)) return NULL;
    PyObject* made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddObjectRef(made, "Recipe", (PyObject*)&RecipeType) ||
        PyModule_AddObjectRef(made, "Replay", (PyObject*)&ReplayType))
        return NULL;
    return made;
}
