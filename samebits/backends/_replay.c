/* Replays: the allocations and launches of an earlier call, for new tensors of the same geometry.

   samebits/backends/replay.py records them, and says what a replay is. This file knows nothing of any
   operation. A call costs: a key of the tensors' metadata, one dictionary look-up, the allocations, one copy of
   the launches' parameters with the new addresses, and the launches. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdalign.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

enum {
    MOST_TENSORS = 48,    /* arguments, and allocations */
    MOST_BYTES = 24576,   /* of all launches' parameters: they are copied onto the stack */
    MOST_RECIPES = 8192,  /* of one operation; more would be made as the program runs */
    STREAM = 32,          /* where CUlaunchConfig has its stream */
    PARAMS = 128,         /* where the parameters begin, after the CUlaunchConfig */
    INVALID_CONTEXT = 201 /* the driver's error code in a thread without a context */
};

typedef int (*LaunchKernel)(const void* config, void* function, void** params, void** extra);
typedef int (*ReplaceAddress)(void* map, void* address);
typedef int (*SetBytes)(unsigned long long at, unsigned char value, size_t count, void* stream);

/* What Python knows of the driver and of PyTorch; set by configure(). */
static struct {
    PyObject *tensor, *parameter, *dtype;      /* types */
    PyObject *modes, *dispatch, *grad_enabled; /* questions to PyTorch */
    PyObject *device, *stream;
    PyObject *allocate, *make_current, *fail;
    LaunchKernel launch;
    ReplaceAddress replace_address;
    SetBytes set_bytes;
} with;

static PyObject *str_dtype, *str_shape, *str_stride, *str_data_ptr, *str_get_device, *str_requires_grad,
    *str_is_neg, *str_numel;

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
    long device;
    int arguments, allocations, launches, ties;
    PyObject* geometries; /* a tuple of (shape, strides, dtype), one for each allocation */
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
    long device;
    int arguments;
    PyObject *geometries, *launches, *kernels, *result, *ties = NULL;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Recipe takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "liO!O!O!O|O!", &device, &arguments, &PyTuple_Type, &geometries,
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

static int address_of(PyObject* tensor, uintptr_t* at) {
    PyObject* found = PyObject_VectorcallMethod(str_data_ptr, &tensor, 1, NULL);
    if (found == NULL) return -1;
    *at = (uintptr_t)PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
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
static int run_from(int* i, const Recipe* recipe, const Tensors* tensors, uintptr_t stream,
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
            code = with.set_bytes(to, 0, launch->size, (void*)stream);
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
    PyObject* device = PyLong_FromLong(recipe->device);
    if (device == NULL) return -1;
    PyObject* found = PyObject_CallOneArg(with.stream, device);
    Py_DECREF(device);
    if (found == NULL) return -1;
    uintptr_t stream = (uintptr_t)PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    if (PyErr_Occurred()) return -1;

    alignas(128) unsigned char bytes[MOST_BYTES];
    memcpy(bytes, recipe->bytes, recipe->size);
    int i = 0, code = run_from(&i, recipe, tensors, stream, bytes);
    if (code == INVALID_CONTEXT) {
        PyObject* made = PyObject_CallFunction(with.make_current, "l", recipe->device);
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

static PyObject* replay(const Recipe* recipe, Tensors* tensors, PyObject* const* args) {
    PyObject* result = NULL;
    for (; tensors->count < recipe->allocations; tensors->count++) {
        PyObject* geometry = PyTuple_GET_ITEM(recipe->geometries, tensors->count);
        PyObject* made = PyObject_Vectorcall(with.allocate, ((PyTupleObject*)geometry)->ob_item, 3, NULL);
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
    PyObject* questions; /* NULL, or a tuple of functions: only if all answer no is a call replayed */
} Replay;

/* Whether a question is answered by false or 0; -1 with an error. */
static int is_no(PyObject* question) {
    PyObject* answer = PyObject_CallNoArgs(question);
    if (answer == NULL) return -1;
    int yes = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return yes < 0 ? -1 : !yes;
}

/* `self`: the index of the first argument that is the same object; `recorded`: whether autograd records it. */
static int add_tensor(PyObject* key, Py_ssize_t* next, PyObject* tensor, Tensors* tensors, int i, int self,
                      int recorded, long* device) {
    PyObject* parts[4] = {NULL};
    if (address_of(tensor, &tensors->at[i])) return -1;
    PyObject* on = PyObject_VectorcallMethod(str_get_device, &tensor, 1, NULL);
    if (on == NULL) return -1;
    long index = PyLong_AsLong(on);
    Py_DECREF(on);
    if (index == -1 && PyErr_Occurred()) return -1;
    if (*device == LONG_MIN) *device = index;
    if (*device != index) return 1; /* on several devices */
    if (tensors->at[i] == 0) {      /* empty, or without memory of its own */
        PyObject* count = PyObject_VectorcallMethod(str_numel, &tensor, 1, NULL);
        if (count == NULL) return -1;
        int some = PyObject_IsTrue(count);
        Py_DECREF(count);
        if (some) return some;
    }
    int same = i;
    for (int j = 0; j < i && same == i; j++)
        if (tensors->at[j] == tensors->at[i] && tensors->at[j] != 0) same = j;
    parts[0] = PyObject_GetAttr(tensor, str_dtype);
    parts[1] = PyObject_GetAttr(tensor, str_shape);
    parts[2] = PyObject_VectorcallMethod(str_stride, &tensor, 1, NULL);
    char tail[4] = {(char)(tensors->at[i] & 15), (char)same, (char)self,
                    (char)recorded}; /* four bytes: no other argument has such a part */
    parts[3] = PyBytes_FromStringAndSize(tail, 4);
    for (int p = 0; p < 4; p++) {
        if (parts[p] == NULL) {
            for (int rest = p; rest < 4; rest++) Py_XDECREF(parts[rest]);
            return -1;
        }
        PyTuple_SET_ITEM(key, (*next)++, parts[p]);
    }
    return 0;
}

/* Whether a tensor has an attribute that is not False, or the method returns that: 1, 0, or -1 with an error. */
static int is_true(PyObject* found) {
    Py_XDECREF(found);
    return found == NULL ? -1 : found != Py_False;
}

static int is_number(PyObject* x) { return x == Py_None || PyLong_Check(x) || PyUnicode_CheckExact(x); }

/* A tuple of numbers, of those in a tuple or a list. NULL: there are other things in it. */
static PyObject* numbers(PyObject* x) {
    PyObject* found = PyTuple_Check(x) ? Py_NewRef(x) : PyList_AsTuple(x);
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(found); i++) {
        PyObject* one = PyTuple_GET_ITEM(found, i);
        if (!is_number(one) || PyBool_Check(one)) Py_CLEAR(found);
    }
    return found;
}

/* A key of all that decides what a call does, but for the addresses. NULL, perhaps with an error: there is none.
   `grad_enabled` is -1 where PyTorch has looked at the tensors before. `recorded` becomes 1 if autograd records
   the call. Calls without gradients have keys of their own, as they return no views. */
static PyObject* make_key(PyObject* const* args, Py_ssize_t count, PyObject* names, int grad_enabled,
                          Tensors* tensors, long* device, int* recorded) {
    Py_ssize_t size = 2, next = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        size += is_tensor(args[i]) ? 4 : 1;
    }
    PyObject* key = PyTuple_New(size);
    if (key == NULL) return NULL;
    *device = LONG_MIN;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *x = args[i], *part = NULL;
        tensors->at[i] = 0;
        if (is_tensor(x)) {
            int one = 0, self = 0;
            if (grad_enabled >= 0 && is_true(PyObject_VectorcallMethod(str_is_neg, &x, 1, NULL))) goto none;
            if (grad_enabled == 1) {
                one = is_true(PyObject_GetAttr(x, str_requires_grad));
                if (one < 0) goto none;
                while (args[self] != x) self++;
            }
            *recorded |= one;
            if (grad_enabled == 0) one = 2;
            if (add_tensor(key, &next, x, tensors, (int)i, self, one, device)) goto none;
            continue;
        }
        if (PyBool_Check(x)) {
            part = PyBytes_FromStringAndSize(x == Py_True ? "T" : "F", 1); /* True == 1 as a key */
        } else if (PyFloat_CheckExact(x)) {
            double value = PyFloat_AS_DOUBLE(x);
            part = PyBytes_FromStringAndSize((const char*)&value, sizeof value); /* -0.0 == 0.0 as a key */
        } else if (is_number(x) || (PyObject*)Py_TYPE(x) == with.dtype) {
            part = Py_NewRef(x);
        } else if (PyTuple_Check(x) || PyList_CheckExact(x)) {
            part = numbers(x);
        } else {
            goto none;
        }
        if (part == NULL) goto none;
        PyTuple_SET_ITEM(key, next++, part);
    }
    if (*device == LONG_MIN) goto none; /* no tensor */
    PyObject* index = PyLong_FromLong(*device);
    if (index == NULL) goto none;
    PyTuple_SET_ITEM(key, next++, index);
    PyTuple_SET_ITEM(key, next, Py_NewRef(names == NULL ? Py_None : names));
    return key;
none:
    Py_DECREF(key);
    return NULL;
}

static int on_current_device(long device) {
    PyObject* current = PyObject_CallNoArgs(with.device);
    if (current == NULL) return -1;
    long index = PyLong_AsLong(current);
    Py_DECREF(current);
    return index == -1 && PyErr_Occurred() ? -1 : index == device;
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

/* Whether calls may be replayed at all now: 1, 0, or -1 with an error. */
static int may_replay(const Replay* self) {
    int no = is_no(with.modes);
    if (no == 1) no = is_no(with.dispatch);
    for (Py_ssize_t i = 0; no == 1 && self->questions != NULL && i < PyTuple_GET_SIZE(self->questions); i++)
        no = is_no(PyTuple_GET_ITEM(self->questions, i));
    return no;
}

static PyObject* replay_call(Replay* self, PyObject* const* args, size_t nargsf, PyObject* names) {
    Py_ssize_t count = PyVectorcall_NARGS(nargsf), named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    Tensors tensors;
    tensors.count = 0;
    long device;
    if (with.tensor == NULL || count + named > MOST_TENSORS / 2) goto slow;
    int may = may_replay(self), grad_enabled = -1;
    if (may == 1 && self->questions != NULL) {
        grad_enabled = is_no(with.grad_enabled);
        grad_enabled = grad_enabled < 0 ? -2 : !grad_enabled;
    }
    if (may < 0 || grad_enabled == -2) return NULL;
    if (!may) goto slow;
    int by_autograd = 0;
    PyObject* key = make_key(args, count + named, names, grad_enabled, &tensors, &device, &by_autograd);
    int here = key == NULL ? 0 : on_current_device(device);
    if (here != 1) { /* tensors without data, such as sparse ones, have errors for their strides */
        PyErr_Clear();
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
    long device;
    int by_autograd = 0;
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

static PyObject* configure(PyObject* self, PyObject* args) {
    (void)self;
    PyObject* found[11];
    unsigned long long launch, replace_address, set_bytes;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOKKK", &found[0], &found[1], &found[2], &found[3], &found[4],
                          &found[5], &found[6], &found[7], &found[8], &found[9], &found[10], &launch,
                          &replace_address, &set_bytes))
        return NULL;
    PyObject** to[] = {&with.tensor,   &with.parameter,    &with.dtype,  &with.modes,
                       &with.dispatch, &with.grad_enabled, &with.device, &with.stream,
                       &with.allocate, &with.make_current, &with.fail};
    for (int i = 0; i < 11; i++) Py_XSETREF(*to[i], Py_NewRef(found[i]));
    with.launch = (LaunchKernel)(uintptr_t)launch;
    with.replace_address = (ReplaceAddress)(uintptr_t)replace_address;
    with.set_bytes = (SetBytes)(uintptr_t)set_bytes;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Say what the driver and PyTorch are. See replay.py."}, {NULL}};

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
    str_dtype = PyUnicode_InternFromString("dtype");
    str_shape = PyUnicode_InternFromString("shape");
    str_stride = PyUnicode_InternFromString("stride");
    str_data_ptr = PyUnicode_InternFromString("data_ptr");
    str_requires_grad = PyUnicode_InternFromString("requires_grad");
    str_numel = PyUnicode_InternFromString("numel");
    str_is_neg = PyUnicode_InternFromString("is_neg");
    str_get_device = PyUnicode_InternFromString("get_device");
    if (PyType_Ready(&RecipeType) || PyType_Ready(&ReplayType)) return NULL;
    PyObject* made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddObjectRef(made, "Recipe", (PyObject*)&RecipeType) ||
        PyModule_AddObjectRef(made, "Replay", (PyObject*)&ReplayType))
        return NULL;
    return made;
}
