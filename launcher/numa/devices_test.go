package numa

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func tree(files map[string]string) fstest.MapFS {
	fsys := fstest.MapFS{}
	for name, text := range files {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return fsys
}

const (
	procGPU = "proc/driver/nvidia/gpus/"
	kfdNode = "sys/class/kfd/kfd/topology/nodes/"
)

func TestDevices(t *testing.T) {
	information := func(minor, excluded string) string {
		return "Model: \t\t NVIDIA H200\nIRQ:   \t\t 0\n" +
			"GPU UUID: \t GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c\nBus Type: \t PCIe\n" +
			"Bus Location: \t 0000:19:00.0\nDevice Minor: \t " + minor + "\nGPU Excluded:\t " + excluded + "\n"
	}
	properties := func(location, domain, minor string) string {
		return "cpu_cores_count 0\nsimd_count 304\nvendor_id 4098\nlocation_id " + location + "\ndomain " + domain +
			"\ndrm_render_minor " + minor + "\n"
	}
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  []string
	}{
		{"NVIDIA in bus order, whatever the minor", map[string]string{
			procGPU + "0000:dc:00.0/information":  information("0", "No"),
			procGPU + "0000:19:00.0/information":  information("1", "No"),
			procGPU + "10000:01:00.0/information": information("2", "No"),
			"dev/nvidia0":                         "", "dev/nvidia1": "", "dev/nvidia2": "", "dev/nvidiactl": "",
		}, []string{"0000:19:00.0", "0000:dc:00.0", "10000:01:00.0"}},
		{"NVIDIA GPUs of other containers and excluded ones", map[string]string{
			procGPU + "0000:19:00.0/information": information("0", "No"),
			procGPU + "0000:3b:00.0/information": information("1", "No"),
			procGPU + "0000:4c:00.0/information": information("2", "Yes"),
			"dev/nvidia1":                        "", "dev/nvidia2": "",
		}, []string{"0000:3b:00.0"}},
		{"AMD in node order, 10 after 2", map[string]string{
			kfdNode + "0/properties":  "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0\ndrm_render_minor 0\n",
			kfdNode + "2/properties":  properties("62720", "0", "129"), // f5:00.0
			kfdNode + "10/properties": properties("1280", "2", "128"),  // 05:00.0
			"dev/dri/renderD128":      "", "dev/dri/renderD129": "",
		}, []string{"0000:f5:00.0", "0002:05:00.0"}},
		{"AMD partitions, and a GPU of another container", map[string]string{
			kfdNode + "1/properties": properties("1280", "0", "128"),
			kfdNode + "2/properties": properties("1281", "0", "129"),
			kfdNode + "3/properties": properties("5376", "0", "130"),
			kfdNode + "4/gpu_id":     "1", // its properties cannot be read
			"dev/dri/renderD128":     "", "dev/dri/renderD129": "",
		}, []string{"0000:05:00.0", "0000:05:00.0"}},
		{"MetaX", map[string]string{
			pciDir + "/0000:2b:00.0/vendor":            "0x9999\n",
			pciDir + "/0000:2b:00.0/drm/renderD129/ux": "",
			pciDir + "/0000:0f:00.0/vendor":            "0x9999\n",
			pciDir + "/0000:0f:00.0/drm/renderD128/ux": "",
			pciDir + "/0000:3b:00.0/vendor":            "0x9999\n", // of another container
			pciDir + "/0000:3b:00.0/drm/renderD130/ux": "",
			pciDir + "/0000:3c:00.0/vendor":            "0x9999\n", // no GPU
			pciDir + "/0000:00:02.0/vendor":            "0x1a03\n", // the display of the board's controller
			pciDir + "/0000:00:02.0/drm/renderD131/ux": "",
			"dev/dri/renderD128":                       "", "dev/dri/renderD129": "",
			"dev/dri/renderD131": "", "dev/dri/card0": "",
		}, []string{"0000:0f:00.0", "0000:2b:00.0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Devices(tree(tt.files))
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
	t.Run("none", func(t *testing.T) {
		_, err := Devices(tree(map[string]string{pciDir + "/0000:00:02.0/vendor": "0x1a03\n"}))
		require.ErrorContains(t, err, "remove the option")
	})
}

func TestSelect(t *testing.T) {
	devices := []string{"a", "b", "c", "d"}
	for _, tt := range []struct {
		name, list string
		want       []string
		err        string
	}{
		{"reorders", "3,0", []string{"d", "a"}, ""},
		{"spaces", " 1 , 2", []string{"b", "c"}, ""},
		{"ends at -1", "0,2,-1,1", []string{"a", "c"}, ""},
		{"ends beyond the last", "2,4,1", []string{"c"}, ""},
		{"ends at a word", "1,none", []string{"b"}, ""},
		{"empty", "", nil, "V= selects none of the 4 accelerators"},
		{"no device", "NoDevFiles", nil, "V=NoDevFiles selects none"},
		{"twice", "0,1,0", nil, "names accelerator 0 twice"},
		{"UUID", "GPU-8932f937", nil, "use numbers"},
		{"MIG", "MIG-8932f937", nil, "use numbers"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Select(devices, "V", tt.list)
			require.Equal(t, tt.want, got)
			if tt.err == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.err)
			}
		})
	}
	t.Run("partitions share an address", func(t *testing.T) {
		got, err := Select([]string{"a", "a"}, "V", "1,0")
		require.NoError(t, err)
		require.Equal(t, []string{"a", "a"}, got)
	})
}
