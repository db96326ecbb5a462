package gpucheck

import (
	"errors"
	"fmt"

	"dlrover-run/switchbox"
	"dlrover-run/switchbox/nvml"
)

// check runs the checks of the options. The error is one of the command line: a pair names a GPU that is not here.
func check(o options, d drivers, p *progress) (switchbox.Report, error) {
	p.doing("check", "initialising NVML (nvmlInit)")
	m, err := d.manager()
	if err != nil {
		return cannotAsk(err), nil
	}
	devices := m.Devices()
	p.doing("check", "looking for GPUs that NVML does not list")
	unlisted := unlisted(d.files, m.Files())
	p.doing("check", "")
	if len(devices) == 0 && len(unlisted) == 0 {
		return switchbox.Skip(adaptor, "the NVIDIA driver shows this process no GPU"), nil
	}
	r := switchbox.Report{Adaptor: adaptor, Driver: "NVIDIA " + m.Driver()}
	r.Devices = read(o.level, devices, p)
	r.Findings = append(switchbox.Judge(r.Devices), unlisted...)
	p.keep(r)
	if o.level == copies && len(devices) > 0 {
		c := copying{options: o, drivers: d, progress: p, devices: devices, report: &r}
		if err := c.run(); err != nil {
			return r, err
		}
	}
	r.Conclude()
	return r, nil
}

// cannotAsk is the Report where NVML cannot be used. A missing driver is no fault of the node, a broken one is.
func cannotAsk(err error) switchbox.Report {
	if errors.Is(err, nvml.ErrNoDriver) {
		return switchbox.Skip(adaptor, err.Error())
	}
	r := switchbox.Report{Adaptor: adaptor, Findings: []switchbox.Finding{driverFault(err.Error())}}
	r.Conclude()
	return r
}

func driverFault(text string) switchbox.Finding {
	return switchbox.Finding{Check: adaptor, Kind: "gpu.driver", Severity: switchbox.Fatal, Text: text}
}

// read reads as much from the devices as the level needs.
func read(l level, devices []switchbox.Device, p *progress) []switchbox.Facts {
	defer p.doing("check", "")
	calling := func(device int, call string) { p.doing("check", fmt.Sprintf("asking GPU %d for %s", device, call)) }
	if l == inventory {
		return switchbox.ReadUse(devices, calling)
	}
	return switchbox.Read(devices, calling)
}
